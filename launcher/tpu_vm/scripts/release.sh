#!/bin/sh
# Releases the start that waits on this host, or that will come. Reports `released`.
. ./report.sh
: "${container:?}"
released=/tmp/$container.$worker.go
gate=/tmp/$container.$worker.gate
: >"$released" && { [ ! -p "$gate" ] || echo go 1<>"$gate"; report released; }
