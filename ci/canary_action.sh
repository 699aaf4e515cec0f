#!/bin/sh
# The step of action.yml: judges an upgrade of Transformer Engine for the repository in the current folder.
# Settings are variables: MEGACPP_OLD, MEGACPP_NEW, or MEGACPP_REQUIREMENTS (a file with `transformer-engine==X`, as it is
# and as it was at MEGACPP_BASE); MEGACPP_SOURCE, MEGACPP_FAIL_ON, MEGACPP_SARIF, MEGACPP_ARGUMENTS; MEGACPP_TOOL is the
# command of an installed tool.
set -eu

pinned() {  # the release that requirements, a lock or a pyproject.toml on standard input pin
    sed -n 's/^.*transformer[-_.]engine\(\[[^]]*\]\)\{0,1\} *===\{0,1\} *\([0-9][0-9A-Za-z.+]*\).*/\2/Ip' | head -n 1
}

old=${MEGACPP_OLD:-} new=${MEGACPP_NEW:-} file=${MEGACPP_REQUIREMENTS:-}
if [ -n "$file" ]; then
    base=${MEGACPP_BASE:-HEAD^1}
    git cat-file -e "$base:$file" 2>/dev/null || {
        echo "::error::$file is not in $base. Likely cause: a shallow checkout. Next step: fetch-depth: 2, or set old and new."
        exit 2
    }
    old=${old:-$(git show "$base:$file" | pinned)} new=${new:-$(pinned <"$file")}
fi
if [ -z "$old" ] || [ -z "$new" ]; then
    echo "::error::OLD ('$old') and NEW ('$new') are not both known. Next step: set old and new, or give requirements a file with transformer-engine==X."
    exit 2
fi
if [ "$old" = "$new" ]; then
    echo "::notice::Transformer Engine stays at $new: there is nothing to judge."
    exit 0
fi

if [ -z "${MEGACPP_TOOL:-}" ]; then
    python3 -m venv "$RUNNER_TEMP/megacpp-validate"
    "$RUNNER_TEMP/megacpp-validate/bin/python" -m pip install --quiet "$GITHUB_ACTION_PATH"
    MEGACPP_TOOL="$RUNNER_TEMP/megacpp-validate/bin/megacpp-validate"
fi

judge() {  # a format; the other arguments of every call are the same
    # The command and the further arguments are words:
    # shellcheck disable=SC2086
    $MEGACPP_TOOL canary "$old" "$new" --source "${MEGACPP_SOURCE:-.}" --fail-on "${MEGACPP_FAIL_ON:-break}" \
        ${MEGACPP_ARGUMENTS:-} --format "$@"
}

code=0
judge github || code=$?
[ "$code" -le 1 ] || exit "$code"
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || judge markdown >>"$GITHUB_STEP_SUMMARY" || [ $? -eq 1 ]
[ -z "${MEGACPP_SARIF:-}" ] || judge sarif --output "$MEGACPP_SARIF" || [ $? -eq 1 ]
exit "$code"
