# Everything that is locked, each file by its hash. What must be compiled against the base's torch is te.sh's.
source "$(dirname "$0")/settings.sh"

wanted=$(mktemp)
one_line_each /lock/lock.txt | grep -v '^transformer-engine-torch==' >"$wanted" || true
[[ -s $wanted ]] || refuse "the lock is empty" "it was cut short" "make it again with nox -s lock"
needs_hashes "$wanted"
# No dependency is looked for: the lock is whole, and pip check says later where it is not. No constraint of the base:
# the lock was made under it, and says by name where it goes over it.
install() {
  PIP_CONSTRAINT="" "$venv/bin/python" -m pip install --quiet --require-hashes --no-deps --only-binary :all: \
    --find-links /wheels "$@" -r "$wanted"
}
shopt -s nullglob
found_at=()
for address in $LINKS; do found_at+=(--find-links "$address"); done
lent=(/wheels/*.whl)
if ((${#lent[@]} && ${#found_at[@]})); then
  # What the host lends may be all that there is: its links may lead where nothing answers, which pip waits for.
  said=$(mktemp)
  if ! install 2>"$said"; then
    grep -q 'No matching distribution found' "$said" || refuse "pip failed: $(tail -n 8 "$said")" \
      "a file with another hash, or a full disk" "make the lock again with nox -s lock, or make room"
    install "${found_at[@]}"
  fi
  rm -f "$said"
else
  install "${found_at[@]}"
fi
rm -f "$wanted"
cp /lock/lock.txt /opt/megacpp/record/lock.txt
