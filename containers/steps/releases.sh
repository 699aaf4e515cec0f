# Wheels of Transformer Engine whose sources the static canary compares, each by its hash. keep_releases.sh puts them where
# the canary looks.
source "$(dirname "$0")/settings.sh"

one_line_each /lock/releases.txt | while read -r line; do
  wanted=$(mktemp)
  printf '%s\n' "$line" >"$wanted"
  needs_hashes "$wanted"
  # One at a time: one solution has one version of a distribution.
  "$venv/bin/python" -m pip download --quiet --require-hashes --no-deps --only-binary :all: --find-links /wheels \
    --dest /fetched -r "$wanted"
  rm -f "$wanted"
done
