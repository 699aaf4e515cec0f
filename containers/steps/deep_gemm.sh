# DeepGEMM from its commit. Kernels are compiled where it runs: its cache key holds the include path, so that it is
# installed once, here, and never moved.
source "$(dirname "$0")/settings.sh"

# It would keep a cache folder that is named while it is built for ever.
unset DG_JIT_CACHE_DIR
cd "/source/$DEEP_GEMM_SUBDIRECTORY"
for pair in $DEEP_GEMM_VARIABLES; do export "${pair?}"; done
if [[ -n $JOBS ]]; then export MAX_JOBS=$JOBS; fi
"$venv/bin/python" setup.py --quiet bdist_wheel --dist-dir /built
