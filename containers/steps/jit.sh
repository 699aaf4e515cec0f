# Kernels that can be compiled without a GPU, into the folder of one architecture, and sealed so that any user may add
# what is missing. The rest is compiled on a GPU, by `nox -s prewarm`, and comes in as a layer or a volume.
set -euo pipefail

cd /tmp
PYTHONPATH=/context /opt/megacpp/venv/bin/python -P -m megacpp_validate.cli prewarm --target "$TARGET" \
  --root /opt/megacpp/jit --at-build --shared --no-verify
