# A virtual environment over the base: nothing that the base has is written to, and a base that has a stack is seen.
source "$(dirname "$0")/settings.sh"

# What the image must not have of the base is taken out of it, by name, and kept on record.
mkdir -p /opt/megacpp/record
for name in $REMOVES; do
  version=$(python3 -m pip show "$name" 2>/dev/null | sed -n 's/^Version: //p' || true) # a base need not have it
  if [[ -n $version ]]; then
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip uninstall --quiet --yes "$name"
    printf '%s==%s\n' "$name" "$version" >>/opt/megacpp/record/removed.txt
  fi
done

if [[ $SYSTEM_SITE_PACKAGES == 1 ]]; then
  # The base's own pip serves: it is seen from inside, and installs where the interpreter lies.
  python3 -m venv --system-site-packages --without-pip "$venv"
else
  python3 -m venv "$venv"
fi
# The package is found behind everything else, so that one that is put before it (PYTHONPATH) wins.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '/opt/megacpp\n' >"$site/megacpp.pth"
