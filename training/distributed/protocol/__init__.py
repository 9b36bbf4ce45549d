"""The protocol of the rendezvous, without sockets, threads and clocks: bytes and times come in, bytes go out.

`messages` is what may be on the wire, `greeting` how each side proves that it belongs to the attempt, `server` what
host 0 does with a connection's bytes. What the hosts' events mean is in `training.distributed.barrier_state`.
"""
