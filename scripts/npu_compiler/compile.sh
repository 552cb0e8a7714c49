#!/usr/bin/env bash
# What `mirrorsd compile --npu-compiler` calls: compile.sh MODEL.xml BLOB PLATFORM [KEY=VALUE ...]
# Runs the compiler that setup.sh has set up, in the folder of the blob: its schedule's trace appears there.
set -euo pipefail
folder=${MIRRORSD_NPU_COMPILER:-$HOME/.cache/mirrorsd/npu-compiler}
if [ ! -f "$folder/bin/compile_ir.exe" ]; then
    echo "[ERROR] there is no compiler in $folder: run $(dirname "$0")/setup.sh first"
    exit 1
fi
model=$(realpath "$1") blob=$(realpath -m "$2")
shift 2
cd "$(dirname "$blob")"
export WINEPREFIX="$folder/prefix" WINEARCH=win64 WINEDEBUG=-all WINEPATH="$folder/bin"
exec wine "$folder/bin/compile_ir.exe" "Z:$model" "Z:$blob" "$@"
