# Sourced by every step that fetches: what the host lends to a build, and what every pip of a build is told.
# shellcheck shell=bash
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
secrets=/run/secrets
if [[ -s $secrets/pip_conf ]]; then export PIP_CONFIG_FILE=$secrets/pip_conf; fi
if [[ -s $secrets/ca_bundle ]]; then
  export PIP_CERT=$secrets/ca_bundle SSL_CERT_FILE=$secrets/ca_bundle REQUESTS_CA_BUNDLE=$secrets/ca_bundle
fi
export venv=/opt/megacpp/venv

# refuse WHAT CAUSE NEXT: how every step ends that cannot go on.
refuse() {
  printf '%s: %s. Likely cause: %s. Next step: %s.\n' "$(basename "$0" .sh)" "$1" "$2" "$3" >&2
  exit 1
}

# one_line_each LOCK: a lock with one requirement a line, comments left out.
one_line_each() { sed -e ':a' -e '/\\$/N; s/\\\n//; ta' "$1" | sed -e '/^[[:space:]]*#/d' -e '/^[[:space:]]*$/d'; }

# needs_hashes FILE: no line without a hash goes to pip; pip says so too, and this says which.
needs_hashes() {
  local bare
  bare=$(grep -v -- '--hash=sha256:' "$1" || true)
  [[ -z $bare ]] || refuse "lines without a hash in the lock: $(head -n 3 <<<"$bare" | tr '\n' ' ')" \
    "the lock was edited by hand" "make it again with nox -s lock"
}
