#!/bin/sh
# Included by every script that reports. gcloud mixes the output of hosts, so a report is one line with the worker
# index: `tpu-launch <worker> <word> <detail>`.
. ./engine.sh
metadata=http://metadata.google.internal/computeMetadata/v1/instance
# Our own connections set $connected_worker: their host keys tell the hosts apart. gcloud gives all hosts the same text.
# curl must not read standard input, which may carry a script's data.
worker=${connected_worker:-$(
  curl -sf --max-time 10 -H 'Metadata-Flavor: Google' "$metadata/attributes/agent-worker-number" </dev/null
)}
report() { echo "tpu-launch ${worker:-?} $*"; }
