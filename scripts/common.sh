# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The steps that every driver shares. A driver sources this file, then says what its case is and what must hold:
#
#   declare_case steps=50 minutes=30
#   train "$@"
#   check 'data["train/loss"]["50"] < 0.8' --when policy.init=pretrained 'data["train/loss"]["1"] < 1.0'
#
# With LORA_SUITE_PLAN=1 nothing runs: when the driver ends, one line of JSON says what it declared.
# Exit status: 0 passed, 1 a check failed, 2 wrong usage or configuration, 3 the training broke,
# 4 the declared steps were not reached, 5 no limit is known for this GPU, 130 interrupted.

set -euo pipefail

# say MESSAGE: tell whoever runs the driver.
say() {
  printf 'lora-suite: %s: %s\n' "${suite_driver##*/}" "$1" >&2
}

# stop STATUS MESSAGE: end the driver here.
stop() {
  say "$2"
  exit "$1"
}

suite_driver=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)/$(basename "${BASH_SOURCE[1]}")
suite_stem=$(basename "$suite_driver" .sh)
suite_root=$(dirname "$(dirname "$suite_driver")")
suite_recipe=$suite_root/recipes/$suite_stem.yaml
suite_planning=${LORA_SUITE_PLAN:-0}
suite_steps='' suite_minutes='' suite_waiver='' suite_trained='' suite_problem='' suite_reached=0
suite_failed=0 suite_unlimited=0 suite_passed=0
suite_train_calls=() suite_check_fields=() suite_evidence=()

command -v jq > /dev/null ||
  stop 2 'jq is missing, and no run can be checked without it: apt-get install jq (or brew install jq)'

# declare_case steps=N minutes=M: the last step that must be reached, and the longest that one run may take.
declare_case() {
  local word
  for word in "$@"; do
    case $word in
      steps=*) suite_steps=${word#*=} ;;
      minutes=*) suite_minutes=${word#*=} ;;
      *) stop 2 "declare_case: '$word' is not steps=N or minutes=M" ;;
    esac
  done
  [[ $suite_steps =~ ^[1-9][0-9]*$ ]] || stop 2 "declare_case: steps='$suite_steps' is not a whole number from 1"
  [[ $suite_minutes =~ ^[0-9]+(\.[0-9]+)?$ && $suite_minutes =~ [1-9] ]] ||
    stop 2 "declare_case: minutes='$suite_minutes' is not a number above 0"
}

# train [--keep] [OVERRIDE…]: train the recipe of this driver's name. Every word reaches the trainer as it is.
train() {
  local word words=() statuses=(0 0)
  [[ $suite_steps ]] || stop 2 'declare_case must come before train'
  [[ -f $suite_recipe ]] || stop 2 "there is no recipe of this driver's name: $suite_recipe"
  for word in "$@"; do
    if [[ $word == --keep ]]; then LORA_SUITE_KEEP=1; else words+=("$word"); fi
  done
  suite_train_calls+=("$(jq -cn '$ARGS.positional' --args -- ${words[@]+"${words[@]}"})")
  [[ $suite_planning == 1 ]] && return
  prepare_run
  # tee must outlive an interrupt, or the trainer's last words have nowhere to go.
  lora-suite train --config "$suite_recipe" ${words[@]+"${words[@]}"} 2>&1 |
    tee -i -a "$LORA_SUITE_RUN_DIR/train.log" || statuses=("${PIPESTATUS[@]}")
  [[ ${statuses[0]} == 0 ]] || exit "${statuses[0]}"
  [[ ${statuses[1]} == 0 ]] || stop 3 "cannot write $LORA_SUITE_RUN_DIR/train.log"
  suite_trained=1
}

# Settle where the run goes and under which id; find the commands where no environment is active.
prepare_run() {
  local bin=$suite_root/.venv/bin
  if ! command -v lora-suite > /dev/null; then
    [[ -x $bin/lora-suite ]] ||
      stop 2 "lora-suite is neither on PATH nor in $bin: pip install lora-suite, or activate its environment"
    PATH=$bin:$PATH
  fi
  export LORA_SUITE_RUN_DIR=${LORA_SUITE_RUN_DIR:-$PWD/results/manual/$(date +%Y%m%d-%H%M%S)-$suite_stem}
  export LORA_SUITE_RUN_ID=${LORA_SUITE_RUN_ID:-$suite_stem-$(date +%Y%m%dT%H%M%S)-$$}
  export LORA_SUITE_CASE=${LORA_SUITE_CASE:-$suite_stem}
  mkdir -p "$LORA_SUITE_RUN_DIR" || stop 2 "cannot create the run directory $LORA_SUITE_RUN_DIR"
}

# waive reason=… issue=URL owner=… until=YYYY-MM-DD revert_to='EXPRESSION'
# The one check that follows holds a relaxed limit until that day; after it, revert_to is the limit again.
waive() {
  local word key
  local -A told=()
  for word in "$@"; do
    key=${word%%=*}
    case $key in
      reason | issue | owner | until | revert_to) told[$key]=${word#*=} ;;
      *) stop 2 "waive: '$word' is not one of reason= issue= owner= until= revert_to=" ;;
    esac
  done
  for key in reason issue owner until revert_to; do
    [[ ${told[$key]:-} ]] || stop 2 "waive: $key= is missing"
  done
  [[ ${told[until]} =~ ^[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] || stop 2 "waive: until='${told[until]}' is not YYYY-MM-DD"
  suite_waiver=$(jq -cn '$ARGS.positional | {reason: .[0], issue: .[1], owner: .[2], until: .[3], revert_to: .[4],
    line: .[5] | tonumber}' --args -- "${told[reason]}" "${told[issue]}" "${told[owner]}" "${told[until]}" \
    "${told[revert_to]}" "${BASH_LINENO[0]}")
}

# check [--when KEY=VALUE] [--on GPU] EXPRESSION…: what must hold of the metrics.
# A condition holds for the expressions after it, until another of its kind: --when compares a key of the
# recipe, --on the GPU's model (limits for several models stand side by side in one call).
check() {
  local when='' on='' expressions=() conditions=() waiver=$suite_waiver
  suite_waiver=''
  while (($#)); do
    case $1 in
      --when)
        [[ ${2:-} == ?*=* ]] || stop 2 "check --when wants KEY=VALUE, not '${2:-}'"
        when=$2
        shift
        ;;
      --on)
        [[ ${2:-} ]] || stop 2 'check --on wants the model of a GPU'
        on=$2
        shift
        ;;
      *)
        suite_check_fields+=("$1" "${BASH_LINENO[0]}" "$when" "$on" "$waiver")
        expressions+=("$1")
        conditions+=("$when" "$on")
        ;;
    esac
    shift
  done
  ((${#expressions[@]})) || stop 2 'check wants at least one expression'
  [[ -z $waiver || ${#expressions[@]} == 1 ]] || stop 2 'a waiver relaxes one limit: give it a check of its own'
  [[ $suite_planning == 1 ]] && return
  [[ $suite_trained ]] || stop 2 'train must come before check'
  find_last_step
  [[ -z $suite_problem ]] || stop 4 "$suite_problem"
  [[ -z $waiver ]] || expressions=("$(waived_limit "$waiver" "${expressions[0]}")")
  judge "${expressions[@]}" -- "${conditions[@]}"
}

# waived_limit WAIVER EXPRESSION: print the limit that counts today.
waived_limit() {
  if [[ $(jq -r .until <<< "$1") < $(date -u +%F) ]]; then
    say "waiver expired, the limit is as before: $(jq -r .revert_to <<< "$1")"
    jq -r .revert_to <<< "$1"
  else
    printf '%s\n' "$2"
  fi
}

# Find how far this run's own metrics go; suite_problem then says why they may not be judged, if so.
find_last_step() {
  local record=$LORA_SUITE_RUN_DIR/run.json
  if [[ $(jq -r .run_id "$record" 2> /dev/null) != "$LORA_SUITE_RUN_ID" ]]; then
    suite_problem="$record is not of this run ($LORA_SUITE_RUN_ID): its metrics are not judged"
    return
  fi
  suite_reached=$(jq '[."train/loss" // {} | keys[] | tonumber] | max // 0' \
    "$LORA_SUITE_RUN_DIR/metrics.json" 2> /dev/null) || suite_reached=0
  ((${suite_reached:=0} >= suite_steps)) || suite_problem="reached $suite_reached of $suite_steps steps"
}

# judge EXPRESSION… -- WHEN ON …: run the checker on those expressions whose conditions hold.
judge() {
  local all=() applied=() model status=0 index when on limited=0 matched=0 evidence
  while [[ $1 != -- ]]; do
    all+=("$1")
    shift
  done
  shift
  model=$(jq -r '.environment.strict.device // "an unknown device"' "$LORA_SUITE_RUN_DIR/run.json")
  for index in "${!all[@]}"; do
    when=$1 on=$2
    shift 2
    if [[ $when ]] && ! recipe_says "$when"; then
      echo "not judged ($when does not hold): ${all[index]}"
    elif [[ $on ]]; then
      limited=1
      if [[ ${model,,} == *"${on,,}"* ]]; then
        matched=1
        applied+=("${all[index]}")
      else
        echo "not judged (limit for $on, this is $model): ${all[index]}"
      fi
    else
      applied+=("${all[index]}")
    fi
  done
  ((limited == matched)) || suite_unlimited=1
  ((${#applied[@]})) || return 0
  # One process prints the table where the driver prints, and the record into the variable.
  exec 4>&1
  evidence=$(check_metrics --record /dev/fd/3 "$LORA_SUITE_RUN_DIR/metrics.json" -- "${applied[@]}" 3>&1 >&4) ||
    status=$?
  exec 4>&-
  case $status in
    0) suite_passed=1 ;;
    1) suite_failed=1 ;;
    *) stop 2 "check_metrics ended with status $status" ;;
  esac
  suite_evidence+=("$evidence")
}

# recipe_says KEY=VALUE: whether the recipe that ran has that value.
recipe_says() {
  local status=0
  jq -e --arg key "${1%%=*}" --arg value "${1#*=}" '.tree | getpath($key / ".") | tostring == $value' \
    "$LORA_SUITE_RUN_DIR/recipe.json" > /dev/null || status=$?
  ((status <= 1)) || stop 3 "cannot read $LORA_SUITE_RUN_DIR/recipe.json"
  return "$status"
}

# What the driver declared, as one line of JSON.
print_plan() {
  local IFS=,
  jq -cn --argjson steps "$suite_steps" --argjson minutes "$suite_minutes" \
    --argjson train "[${suite_train_calls[*]-}]" '
    def text: if . == "" then null else . end;
    {steps: $steps, minutes: $minutes, train: $train,
     checks: [range(0; $ARGS.positional | length; 5) as $at | $ARGS.positional[$at:$at + 5] |
       {expression: .[0], line: .[1] | tonumber, when: .[2] | text, on: .[3] | text,
        waiver: (.[4] | text | if . then fromjson else null end)}]}' \
    --args -- ${suite_check_fields[@]+"${suite_check_fields[@]}"}
}

# Write down what was checked, and end with the status that the whole run has earned.
finish() {
  local status=$?
  trap - EXIT
  if [[ $suite_planning == 1 ]]; then
    ((status == 0)) || exit "$status"
    [[ $suite_steps ]] || stop 2 'the driver never called declare_case'
    print_plan
    exit
  fi
  [[ $suite_trained ]] || exit "$status"
  # A driver without checks must still have trained to its end.
  if ((status == 0 && suite_reached == 0)); then
    find_last_step
    if [[ $suite_problem ]]; then
      say "$suite_problem"
      status=4
    fi
  fi
  if ((status == 0 && suite_failed)); then status=1; fi
  if ((status == 0 && suite_unlimited)); then status=5; fi
  printf '%s\n' ${suite_evidence[@]+"${suite_evidence[@]}"} |
    jq -s --argjson steps "$suite_steps" --argjson reached "$suite_reached" --argjson status "$status" \
      '{status: $status, steps: $steps, reached: $reached, checks: (map(.checks) | add // [])}' \
      > "$LORA_SUITE_RUN_DIR/checks.json"
  # Checkpoints have served once the last step passed its checks.
  if ((status == 0 && suite_passed)) && [[ ${LORA_SUITE_KEEP:-0} != 1 ]]; then
    rm -rf -- "$LORA_SUITE_RUN_DIR/ckpts"
  fi
  exit "$status"
}
trap finish EXIT
