# Runs a step where no engine builds the image, and leaves its log and a receipt of kind build-step in a folder:
#   bash /steps/record.sh te /tmp/receipts
set -euo pipefail

step=$1 kept=$2 script=$(dirname "$0")/$1.sh
started=$(date --utc +%FT%TZ) ended=0 wheels=""
SECONDS=0
bash "$script" >"$kept/$step.log" 2>&1 || ended=$?
seconds=$SECONDS

hash_of() { sha256sum "$1" | cut -d ' ' -f 1; }
shopt -s nullglob
for wheel in /built/*.whl; do wheels+="${wheels:+, }\"$(basename "$wheel")\": \"$(hash_of "$wheel")\""; done
printf '{"kind": "build-step", "step": "%s", "script": "%s", "lock": "%s", "exit": %d, "started": "%s", "seconds": %d, "wheels": {%s}}\n' \
  "$step" "$(hash_of "$script")" "$(hash_of /lock/lock.txt)" "$ended" "$started" "$seconds" "$wheels" >"$kept/$step.json"
exit "$ended"
