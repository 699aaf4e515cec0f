#!/bin/sh
# One GitHub issue for each issue text of `nox -s te_watch`: opened when no issue has its title, rewritten otherwise.
# The first line of a text is its title.  publish_issues.sh FOLDER
set -eu
for text in "$1"/*.md; do
    [ -e "$text" ] || { echo "no issue text in $1: nothing is new"; exit 0; }
    title=$(sed -n '1s/^# *//p' "$text")
    export TITLE="$title"
    known=$(gh issue list --state all --limit 500 --json number,title \
        --jq ".[] | select(.title == env.TITLE) | .number" | head -n 1)
    if [ -n "$known" ]; then
        gh issue edit "$known" --body-file "$text"
    else
        gh issue create --title "$title" --body-file "$text" --label te-watch
    fi
done
