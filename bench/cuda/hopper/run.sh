#!/bin/bash
# Checks bits and times kernels with what build.py made, in at most about 110 seconds; nothing that hangs takes all of
# them. The table is last. One variant that fails leaves the others; the exit status says whether any was wrong.
#
#     bash bench/cuda/hopper/run.sh BUILT OUT [VARIANT...]
here=$(cd "$(dirname "$0")" && pwd)
built=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
shift 2
variants=${*:-$(cut -d' ' -f1 "$built/variants.txt")}
status=0
left() { [ $SECONDS -lt "$1" ]; }

# Built here, if that works: the packed one may need a newer system.
harness=$(mktemp)
g++ -O1 -std=c++17 "$here/hopper.cpp" -o "$harness" -ldl > "$out/build.txt" 2>&1 || cp "$built/hopper" "$harness"
chmod +x "$harness"

timeout -s KILL 15 "$harness" "$built" order > "$out/order.txt" 2>&1 || echo "ERROR order: $?" >> "$out/order.txt"
for variant in $variants; do
  (
    timeout -s KILL 45 "$harness" "$built" check "$variant" > "$out/check_$variant.txt" 2>&1
    result=$?
    [ $result -gt 1 ] && echo "ERROR check $variant: $result" >> "$out/check_$variant.txt"
    exit $result
  ) &
  checks="$checks $!"
done
for check in $checks; do
  wait "$check" || status=1
done
echo "checks took until $SECONDS s"

cublas=$(find / -xdev \( -path /proc -o -path /sys \) -prune -o -name 'libcublas.so.1[0-9]' -print 2> /dev/null | head -1)
for kernel in wide narrow cublas $variants; do
  left 95 || { echo "ERROR time $kernel: no time is left" > "$out/time_$kernel.txt"; continue; }
  timeout -s KILL 12 "$harness" "$built" time "$kernel" $cublas > "$out/time_$kernel.txt" 2>&1 ||
    echo "ERROR time $kernel: $?" >> "$out/time_$kernel.txt"
done

profile() {
  left 85 || return
  timeout -s KILL 20 ncu --clock-control none --kernel-name regex:linear_hopper --launch-skip 1 --launch-count 1 \
    --section SpeedOfLight --section WarpStateStats --section MemoryWorkloadAnalysis --section SourceCounters \
    "$harness" "$built" one "$@" > "$out/profile_$1.txt" 2>&1
}
if command -v ncu > /dev/null; then
  profile p128 L.gate 2048 1
  profile s64 L.down 64 8
fi
rm -f "$harness"

echo "== 64 and 2,048 rows"
grep -hE "rows (64|2048) " "$out"/time_*.txt | grep -v TABLE
echo "== checks"
for variant in $variants; do tail -4 "$out/check_$variant.txt"; done
echo "== table, after $SECONDS s"
cat "$out/order.txt"
grep -hE "TABLE|ERROR" "$out"/time_*.txt
exit $status
