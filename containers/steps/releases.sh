# Release sources of Transformer Engine, by hash, where the canary looks for what it has fetched before: its static tier
# then compares them with no network. The layout is that of megacpp_validate/canary/sources.py.
source "$(dirname "$0")/settings.sh"

kept=/opt/megacpp/releases
mkdir -p $kept/{releases,wheels,trees}
one_line_each /lock/releases.txt | while read -r line; do
  fetched=$(mktemp -d)
  printf '%s\n' "$line" >"$fetched/wanted.txt"
  needs_hashes "$fetched/wanted.txt"
  "$venv/bin/python" -m pip download --quiet --require-hashes --no-deps --only-binary :all: --find-links /wheels \
    --dest "$fetched" -r "$fetched/wanted.txt"
  wheel=$(basename "$fetched"/*.whl)
  hash=$(sha256sum "$fetched/$wheel" | cut -d ' ' -f 1)
  version=$(cut -d ' ' -f 1 <<<"${line#*==}")
  mkdir -p "$kept/wheels/$hash"
  mv "$fetched/$wheel" "$kept/wheels/$hash/$wheel"
  printf '{"sha256": "%s", "wheel": "%s"}' "$hash" "$wheel" >"$kept/releases/${line%%==*}-$version.json"
  rm -rf "$fetched"
done
chmod -R a+rX $kept
chmod 1777 $kept $kept/*
