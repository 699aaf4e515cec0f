# FlashAttention 3 from its commit, with the kernels that are used and no others: an hour becomes minutes.
source "$(dirname "$0")/settings.sh"

cd "/source/$FLASH_ATTENTION_3_SUBDIRECTORY"
for pair in $FLASH_ATTENTION_3_VARIABLES; do export "${pair?}"; done
# Its set-up fetches another nvcc from the network on some releases of CUDA; the base's is the one that is pinned.
export FLASH_ATTENTION_OFFLINE_BUILD=TRUE
if [[ -n $JOBS ]]; then export MAX_JOBS=$JOBS; fi
"$venv/bin/python" setup.py --quiet bdist_wheel --dist-dir /built
