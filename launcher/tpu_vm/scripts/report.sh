#!/bin/sh
# Included by every script that reports. gcloud mixes the output of hosts, so each report is one line with the worker
# index: `tpu-launch <worker> <word> <detail>`.
. ./engine.sh
metadata=http://metadata.google.internal/computeMetadata/v1/instance
# A connection to this host says which worker it is, and check_host.sh compared that with the metadata server. gcloud gives
# all hosts the same text. Without standard input: that of a script may carry its data.
worker=${connected_worker:-$(
  curl -sf --max-time 10 -H 'Metadata-Flavor: Google' "$metadata/attributes/agent-worker-number" </dev/null
)}
report() { echo "tpu-launch ${worker:-?} $*"; }
