#!/bin/sh
# Included by every script that calls the container engine. $docker is one word or three: a fresh login may not be in
# the engine's group yet.
# shellcheck disable=SC2034 # the scripts that include this one use it
set -u
docker=docker
[ -w /var/run/docker.sock ] || docker='sudo -n docker'
# Prints what docker or sudo said, $errors, on one line.
errors=''
words() { printf '%s ' "$errors" | tr '\n' ' ' | tail -c 600; }
