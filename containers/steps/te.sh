# The half of Transformer Engine that is compiled against torch: its source release, by the hash of the lock.
source "$(dirname "$0")/settings.sh"

wanted=$(mktemp)
one_line_each /lock/lock.txt | grep '^transformer-engine-torch==' >"$wanted" ||
  refuse "the lock has no transformer-engine-torch" "the step te is asked for, and the lock was made without it" \
    "make the lock again with nox -s lock, or take the step te out of matrix/images.toml"
needs_hashes "$wanted"
mkdir -p /built
for pair in $TRANSFORMER_ENGINE_TORCH_VARIABLES; do export "${pair?}"; done
export NVTE_CUDA_ARCHS=$TE_ARCHS
if [[ -n $JOBS ]]; then export MAX_JOBS=$JOBS NVTE_BUILD_MAX_JOBS=$JOBS; fi
PIP_CONSTRAINT="" "$venv/bin/python" -m pip wheel --quiet --require-hashes --no-deps --no-build-isolation \
  --find-links /wheels --wheel-dir /built -r "$wanted"
