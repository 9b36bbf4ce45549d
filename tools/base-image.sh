#!/usr/bin/env bash
# Puts debian:bookworm-slim, from which the images are built, into the engine's store: pulls it, or makes it from Debian's archive if no
# registry can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
image=debian:bookworm-slim
log=.tpu-launch/setup.log
mkdir -p -m 700 .tpu-launch

docker image inspect "$image" >/dev/null 2>&1 && exit
if timeout 120 docker pull --quiet "$image" >>"$log" 2>&1; then
    echo "pulled $image"
    exit
fi
echo "no registry gave $image: making it from Debian's archive (log: $log)"
if ! command -v mmdebstrap >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "$image can't be pulled, and mmdebstrap, which would make it, is missing: let the engine reach a registry, or install mmdebstrap" >&2
        exit 2
    fi
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends mmdebstrap; } >>"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        exit 1
    fi
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# To a file first: a bootstrap that breaks off must not become an image.
if ! { mmdebstrap --variant=minbase --include=ca-certificates bookworm "$folder/base.tar" </dev/null && docker import "$folder/base.tar" "$image"; } >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "$image could not be made; the whole log is $log" >&2
    exit 1
fi
echo "made $image"
