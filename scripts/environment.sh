# Sourced by scripts/quickstart and scripts/test: finds Python, makes the virtual environment, installs.
#
#   PYTHON       interpreter to make the environment with (default: the first Python >= 3.11 found)
#   QWEN35_VENV  the environment's folder (default: .venv in the repository)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${QWEN35_VENV:-$ROOT/.venv}"
PIP_LOG="$VENV/install.log"

# Ends the script with one line that says what is missing.
missing() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

# Whether $1 runs (a shim may exist and not run), is Python >= 3.11 and can make environments.
usable_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints the first usable interpreter among the names given.
first_usable_python() {
  local candidate
  for candidate in "$@"; do
    if usable_python "$candidate"; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

make_environment() {
  if usable_python "$VENV/bin/python"; then
    return 0
  fi
  local python
  if [ -n "${PYTHON:-}" ]; then
    usable_python "$PYTHON" || missing "PYTHON=$PYTHON is not a Python >= 3.11 with venv and ensurepip"
    python="$PYTHON"
  else
    python="$(first_usable_python python3.11 python3.12 python3.13 python3.14 python3 \
      "$HOME"/.pyenv/versions/3.1[1-9].*/bin/python)" ||
      missing "no Python >= 3.11 with venv and ensurepip found: install one, or name it in PYTHON"
  fi
  echo "making $VENV with $("$python" --version)" >&2
  "$python" -m venv --clear "$VENV" || missing "$python could not make $VENV"
}

# Installs the package with the extras named, unless pyproject.toml is the one last installed from.
#   install_package            the base package
#   install_package test ...   with extras, one after the other
install_package() {
  make_environment
  local extra target stamp wanted
  wanted="$("$VENV/bin/python" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read() + sys.argv[2].encode()).hexdigest())' \
    "$ROOT/pyproject.toml" "$ROOT")"
  for extra in "${@:-base}"; do
    stamp="$VENV/installed-$extra"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
      continue
    fi
    target=""
    [ "$extra" = base ] || target="[$extra]"
    echo "installing qwen35-jax$target into $VENV (minutes, the first time)" >&2
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --retries 2 \
      --editable "$ROOT$target" >"$PIP_LOG" 2>&1; then
      missing "pip could not install qwen35-jax$target (no network?):" \
        "$(grep '^ERROR' "$PIP_LOG" | tail -1) (all of it in $PIP_LOG)"
    fi
    echo "$wanted" >"$stamp"
    echo "$wanted" >"$VENV/installed-base"
  done
}
