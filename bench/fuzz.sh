#!/usr/bin/env bash
# Fuzzing at length: bench/fuzz.sh [EXAMPLES]   records, logs, claims, YAML, corpora, words: 3,000 of each
# Without it the tests try 300 of each. A failing example is printed in full.
cd "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 2
export FUZZ=${1:-3000}
exec ./test.sh --all --timeout 0 -W ignore --durations 10 tests/test_fuzz.py \
    tests/papers/claims/test_claims.py::test_a_mutated_file_is_claims_that_can_be_judged_or_one_line \
    tests/papers/logs/test_import_logs.py::test_a_mutated_log_is_a_record_or_no_log_and_never_a_traceback
