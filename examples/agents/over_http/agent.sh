#!/usr/bin/env bash
# An agent of curl and jq alone: it asks a served policy, and says what the answer was worth, session after session.
# With a trainer beside the server the policy learns from it.
#
#     rftdask serve run.yaml                        # says the address and the key
#     rftdask run run.yaml mode=train               # beside it
#     URL=http://127.0.0.1:8000 KEY=... examples/agents/over_http/agent.sh [QUESTION] [SESSIONS]
#
# Sessions of one task are compared with each other: as many as algorithm.repeat_times, or a multiple of it.
set -euo pipefail
question=${1:-"7:"} sessions=${2:-8}

# post PATH BODY [KEY]: the answer. curl comes again by itself where it is told to (429 and 503, with Retry-After).
post() {
    curl --silent --show-error --fail-with-body --retry 20 --max-time 600 \
        --header "Authorization: Bearer ${3:-$KEY}" --header "Content-Type: application/json" --data "$2" "$URL$1"
}

for _ in $(seq "$sessions"); do
    session=$(post /sessions "$(jq -n --arg task "$question" '{task_id: $task}')")
    key=$(jq -r .api_key <<<"$session")
    body=$(jq -n --arg said "$question" '{model: "policy", messages: [{role: "user", content: $said}]}')
    said=$(post "$(jq -r .base_path <<<"$session")/chat/completions" "$body" "$key" | jq -r '.choices[0].message.content')
    # What the policy is to learn: lower-case letters, and nothing else.
    letters=$(LC_ALL=C tr -cd 'a-z' <<<"$said" | wc -c) length=$(LC_ALL=C tr -d '\n' <<<"$said" | wc -c)
    reward=$(jq -n --argjson letters "$letters" --argjson length "$length" '$letters / ([$length, 1] | max)')
    post /feedback "$(jq -n --argjson reward "$reward" '{reward: $reward}')" "$key" | jq -c --argjson r "$reward" '. + {reward: $r}'
done
