# The wheels that stages of this build have made, into the environment; then what is installed is looked at as a whole.
source "$(dirname "$0")/settings.sh"

shopt -s nullglob
made=(/built/*/*.whl)
if ((${#made[@]})); then
  PIP_CONSTRAINT="" "$venv/bin/python" -m pip install --quiet --no-deps --no-index "${made[@]}"
  (cd /built && sha256sum -- */*.whl) >/opt/megacpp/record/built.txt
fi
"$venv/bin/python" -m pip list --format freeze >/opt/megacpp/record/installed.txt
# A base of others need not agree with itself; what is ours alone must.
if ! grep -q '^include-system-site-packages = true' "$venv/pyvenv.cfg"; then
  "$venv/bin/python" -m pip check >/tmp/check.txt ||
    refuse "packages do not fit together: $(tr '\n' ' ' </tmp/check.txt)" "the lock lacks one" \
      "make it again with nox -s lock"
  rm -f /tmp/check.txt
fi
