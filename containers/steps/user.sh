# Who an image runs as: a user without rights, and any other uid as well. What must be written is open to all of them.
set -euo pipefail

if ! getent passwd "$USER_ID" >/dev/null; then
  groupadd --gid "$USER_ID" megacpp
  useradd --uid "$USER_ID" --gid "$USER_ID" --no-create-home --home-dir /tmp --shell /usr/sbin/nologin \
    --no-log-init megacpp
fi
mkdir -p /opt/megacpp/{bin,jit,record,releases} "/opt/megacpp/jit/$CACHE_ARCH" /receipts
chmod 1777 /opt/megacpp/{jit,releases} "/opt/megacpp/jit/$CACHE_ARCH" /receipts
cat >/opt/megacpp/bin/megacpp <<'SH'
#!/bin/sh
exec /opt/megacpp/venv/bin/python -P -m megacpp_validate.images.entry "$@"
SH
cat >/opt/megacpp/bin/megacpp-validate <<'SH'
#!/bin/sh
exec /opt/megacpp/venv/bin/python -P -m megacpp_validate.cli "$@"
SH
chmod 755 /opt/megacpp/bin/*
