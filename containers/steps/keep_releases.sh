# The fetched wheels, kept by the canary itself, which is the one that knows where it looks (canary/static/sources.py).
source "$(dirname "$0")/settings.sh"

export MEGACPP_CACHE_DIR=/opt/megacpp/releases
cd /tmp
for wheel in /fetched/*.whl; do
  IFS=- read -r name version _ <<<"$(basename "$wheel")"
  PIP_NO_INDEX=1 PIP_FIND_LINKS=/fetched PYTHONPATH=/context "$venv/bin/python" -P -c \
    'import sys; from megacpp_validate.canary.static.sources import Sources; Sources().wheel(*sys.argv[1:])' \
    "$version" "${name//_/-}"
done
chmod -R a+rX $MEGACPP_CACHE_DIR
chmod 1777 $MEGACPP_CACHE_DIR $MEGACPP_CACHE_DIR/wheels
