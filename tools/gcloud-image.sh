#!/usr/bin/env bash
# Puts Google's image of gcloud, from which images/launcher takes it, into the engine's store: pulls it, or makes it from this machine's
# gcloud of the same version if no registry can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
image=$(sed -n 's/^FROM \(gcr\.io[^ ]*\).*/\1/p' images/launcher/Dockerfile)
version=${image##*:}
version=${version%-stable}

docker image inspect "$image" >/dev/null 2>&1 && exit
if timeout 600 docker pull --quiet "$image" 2>/dev/null; then
    echo "pulled $image"
    exit
fi
folder=$(gcloud info --format='value(installation.sdk_root)')
if [ "$(cat "$folder/VERSION")" != "$version" ]; then
    echo "no registry gave $image, and $folder is not gcloud $version: let the engine reach a registry, or install that version" >&2
    exit 2
fi
tar -C "$folder" --transform 's,^\.,usr/lib/google-cloud-sdk,' --exclude=__pycache__ -cf - ./VERSION ./bin/gcloud ./lib | docker import - "$image" >/dev/null
echo "made $image from $folder"
