# This project: its package, its matrix, and their byte code, because nobody can write that into an image later.
set -euo pipefail

cp -R --no-preserve=ownership /context/megacpp_validate /context/matrix /opt/megacpp/
chmod -R u=rwX,go=rX /opt/megacpp/megacpp_validate /opt/megacpp/matrix
# By hash and not by time: the same sources give the same files, whenever they are checked out.
/opt/megacpp/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/megacpp/megacpp_validate
