#!/bin/sh
# Build the image of deploy/Containerfile, start it once, and print the digests of its contents.
#
#   BASE=docker.io/library/python:3.11-slim-bookworm@sha256:DIGEST deploy/build.sh holdfast:0.2.0
#
# ENGINE               buildah, podman or docker; the first one that is installed
# WHEELS               a folder of wheels, for a build without a network (docs/guide/deploy.md)
# TORCH_INDEX, EXTRAS  as in the Containerfile
# ISOLATION            chroot, for buildah on a machine whose runtime cannot start a container
set -eu
cd "$(dirname "$0")/.."
name=${1:?name the image: deploy/build.sh holdfast:0.2.0}
: "${BASE:?name the base image by its digest: docs/guide/deploy.md}"
for engine in ${ENGINE:-buildah podman docker}; do
    command -v "$engine" > /dev/null && break
    engine=
done
[ -n "$engine" ] || { echo "install buildah, podman or docker" >&2; exit 2; }

set -- -f deploy/Containerfile -t "$name" --build-arg "BASE=$BASE" --no-cache
[ -z "${TORCH_INDEX:-}" ] || set -- "$@" --build-arg "TORCH_INDEX=$TORCH_INDEX"
[ -z "${EXTRAS:-}" ] || set -- "$@" --build-arg "EXTRAS=$EXTRAS"
if [ "$engine" != docker ]; then  # equal sources give equal bytes: files get the date 0
    set -- "$@" --timestamp 0 ${ISOLATION:+--isolation "$ISOLATION"}
fi
if [ -n "${WHEELS:-}" ]; then
    [ "$engine" != docker ] || { echo "WHEELS needs buildah or podman" >&2; exit 2; }
    conf=$(mktemp)
    trap 'rm -f "$conf"' EXIT
    printf '[global]\nno-index = true\nfind-links = /wheels\n' > "$conf"
    chmod 644 "$conf"
    set -- "$@" -v "$(realpath "$WHEELS"):/wheels:ro" -v "$conf:/etc/pip.conf:ro"
fi
"$engine" build "$@" .

if [ "$engine" = buildah ]; then
    container=$(buildah from "$name")
    buildah run ${ISOLATION:+--isolation "$ISOLATION"} "$container" -- holdfast --version
    buildah rm "$container" > /dev/null
    buildah inspect --type image --format '{{range .OCIv1.RootFS.DiffIDs}}{{println .}}{{end}}' "$name"
else
    "$engine" run --rm "$name" --version
    "$engine" image inspect --format '{{range .RootFS.Layers}}{{println .}}{{end}}' "$name"
fi
