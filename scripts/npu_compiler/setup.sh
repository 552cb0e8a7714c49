#!/usr/bin/env bash
# Sets up Intel's NPU compiler on a Linux machine that has no NPU: OpenVINO's Windows wheel carries it, Wine runs it.
#
#   scripts/npu_compiler/setup.sh [FOLDER]      default: $MIRRORSD_NPU_COMPILER, or ~/.cache/mirrorsd/npu-compiler
#
# Needs root (Debian, Ubuntu) only where Wine and MinGW are not installed. About 600 MB. Safe to run again.
# Prints the command for `mirrorsd compile --npu-compiler`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-${MIRRORSD_NPU_COMPILER:-$HOME/.cache/mirrorsd/npu-compiler}}
version=${OPENVINO_VERSION:-2026.4.1}

if ! { command -v wine && command -v x86_64-w64-mingw32-gcc; } >/dev/null; then
    if [ "$(id -u)" != 0 ]; then
        echo "Wine and MinGW are missing; as root: apt-get install wine64 wine gcc-mingw-w64-x86-64" >&2
        exit 1
    fi
    apt-get update -qq >&2
    apt-get install -y -qq --no-install-recommends wine64 wine gcc-mingw-w64-x86-64 >&2
fi

if [ ! -f "$folder/openvino-$version" ]; then
    mkdir -p "$folder/wheels" "$folder/bin"
    python3 -m pip download -q --no-deps --only-binary=:all: --platform win_amd64 --python-version 3.12 \
        -d "$folder/wheels" "openvino==$version" msvc-runtime >&2
    python3 "$here/unpack.py" "$folder/wheels" "$folder/bin" "$folder/include" >&2
    touch "$folder/openvino-$version"
fi
x86_64-w64-mingw32-gcc -O1 -I"$folder/include" "$here/compile_ir.c" "$folder/bin/openvino_c.lib" -o "$folder/bin/compile_ir.exe"
WINEPREFIX="$folder/prefix" WINEARCH=win64 WINEDEBUG=-all wineboot --init >/dev/null 2>&1 || true
printf 'MIRRORSD_NPU_COMPILER=%s %s\n' "$folder" "$here/compile.sh"
