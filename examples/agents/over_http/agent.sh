#!/usr/bin/env bash
# An agent of only curl and jq: in each session it asks a served policy and reports a reward for the answer. With a
# trainer running, the policy learns from the rewards.
#
#     rftdask serve run.yaml                        # prints the address and the key
#     rftdask run run.yaml mode=train               # at the same time
#     URL=http://127.0.0.1:8000 KEY=... examples/agents/over_http/agent.sh [QUESTION] [SESSIONS]
#
# Sessions of one task are compared with each other; their number is a multiple of algorithm.repeat_times.
set -euo pipefail
question=${1:-"7:"} sessions=${2:-8}

# post PATH BODY [KEY] prints the answer. curl retries on 429 and 503 and honors Retry-After.
post() {
    curl --silent --show-error --fail-with-body --retry 20 --max-time 600 \
        --header "Authorization: Bearer ${3:-$KEY}" --header "Content-Type: application/json" --data "$2" "$URL$1"
}

for _ in $(seq "$sessions"); do
    session=$(post /sessions "$(jq -n --arg task "$question" '{task_id: $task}')")
    key=$(jq -r .api_key <<<"$session")
    body=$(jq -n --arg prompt "$question" '{model: "policy", messages: [{role: "user", content: $prompt}]}')
    answer=$(post "$(jq -r .base_path <<<"$session")/chat/completions" "$body" "$key")
    # The reward is the share of lower-case letters.
    reward=$(jq '.choices[0].message.content | ([scan("[a-z]")] | length) / ([length, 1] | max)' <<<"$answer")
    post /feedback "$(jq -n --argjson reward "$reward" '{reward: $reward}')" "$key" | jq -c --argjson r "$reward" '. + {reward: $r}'
done
