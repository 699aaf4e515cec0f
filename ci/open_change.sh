#!/bin/sh
# What differs under containers/ as one pull request on the branch update-pins.
set -eu
git diff --quiet -- containers && { echo "pins and locks are up to date"; exit 0; }
git config user.name megacpp-validate
git config user.email megacpp-validate@users.noreply.github.com
git switch --force-create update-pins
git commit --quiet --message "Pins and locks of this week" -- containers
git push --force origin update-pins
gh pr view update-pins >/dev/null 2>&1 || gh pr create --head update-pins --title "Pins and locks of this week" \
    --body "Made by \`nox -s lock -- --upgrade all\`. The diff shows what changed; CI says whether it holds."
