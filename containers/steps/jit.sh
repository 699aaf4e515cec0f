# Kernels that can be compiled without a GPU, into the folder of one architecture, sealed and verified. The rest is
# compiled on a GPU, by `nox -s prewarm`, and comes in as a volume.
set -euo pipefail

cd /tmp
PYTHONPATH=/context /opt/megacpp/venv/bin/python -P -m megacpp_validate.cli prewarm --target "$TARGET" \
  --root /opt/megacpp/jit --at-build
