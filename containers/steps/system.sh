# The interpreter: the base's own where it has one; on a Debian base that has none, Debian's.
source "$(dirname "$0")/settings.sh"

if ! command -v python3 >/dev/null; then
  command -v apt-get >/dev/null || refuse "the base has neither python3 nor apt-get" "it is no Debian" \
    "choose a base with Python $PYTHON_VERSION, or a Debian base"
  options=()
  if [[ -s $secrets/apt_sources ]]; then
    options=(-o Dir::Etc::SourceList="$secrets/apt_sources" -o Dir::Etc::SourceParts=/dev/null)
  fi
  # Pages for people double the size of an image that nobody reads them in.
  printf 'path-exclude=/usr/share/doc/*\npath-include=/usr/share/doc/*/copyright\npath-exclude=/usr/share/man/*\n' \
    >/etc/dpkg/dpkg.cfg.d/without-pages
  apt-get "${options[@]}" -qq update
  apt-get "${options[@]}" -qq install -y --no-install-recommends ca-certificates python3 python3-venv >/dev/null
  rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache
fi

found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $found == "$PYTHON_VERSION" ]] || refuse "the base has Python $found, and the lock is for Python $PYTHON_VERSION" \
  "the tag was moved, or another base was given" "give a base with Python $PYTHON_VERSION, or lock for $found in matrix/images.toml"
