"""Compiled programs on the host's disk, for a plugin of PJRT (libtpu): a later start need not compile them again.

store.py    a folder of entries: bounded, and each entry checked
pjrt.py     the plugin's function that compiles, with the store before it

torch_xla 2.9 has a cache of its own (`initialize_cache`) that writes entries and can't read them, on TPUs and on CPUs
(https://github.com/pytorch/xla/issues/9094), so the cache is put where every framework must come through.
"""
