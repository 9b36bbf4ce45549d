"""The emulator: Google's side of a slice, on one machine.

    api/            the Cloud TPU API, its few neighbours, and what they refuse (calls.py: all calls)
    storage.py      Cloud Storage: the JSON API over bucket.py, buckets on disk
    registry.py     Artifact Registry: repositories, the registry's protocol and content
    tls.py          HTTPS under Google's names
    vm/             TPU VMs: their containers, metadata server, container engine and image registry
    operations.py   long-running operations, which make and remove the hosts
    faults.py       injected failures
    state.py        everything that survives the server, in one file
    http_server.py  requests and responses for all services
    server.py       the process that connects these
    control.py      starts, stops and describes that process; `--emulated`

Only the launcher's command line knows that a slice is emulated. The rest of the launcher, and the trainer, reach the
emulator through Google's own interfaces.
"""
