#!/bin/sh
# What the tests of pages need beside Python: Chromium from Debian, axe-core from npm. Where one cannot be had, its tests
# are skipped and say so.
axe=$1
if ! command -v chromium >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1; then
    { apt-get update -qq && apt-get install -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 ||
        echo "chromium could not be installed: the tests that look at pages will be skipped"
fi
if command -v npm >/dev/null 2>&1; then
    npm install --silent --no-audit --no-fund --prefix "$axe" axe-core@4.14.1 >/dev/null 2>&1 ||
        echo "axe-core could not be installed: the tests of accessibility will be skipped"
fi
exit 0
