# Sourced by scripts/test and .ci/run: finds the browser that the tests of the chat page drive.
#
#   QWEN35_CHROMIUM  its program (default: the first of chromium, chromium-browser and google-chrome on the PATH)

# Prints the program of a Chromium that runs.
find_chromium() {
  local candidate program
  for candidate in ${QWEN35_CHROMIUM:-chromium chromium-browser google-chrome}; do
    program="$(command -v "$candidate")" || continue
    if "$program" --version >/dev/null 2>&1; then
      echo "$program"
      return 0
    fi
  done
  return 1
}
