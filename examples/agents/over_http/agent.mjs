// The same in JavaScript: node's built-in fetch, no packages, all sessions in parallel.
//
//     URL=http://127.0.0.1:8000 KEY=... node examples/agents/over_http/agent.mjs [QUESTION] [SESSIONS]

const [question = "7:", sessions = "8"] = process.argv.slice(2);

async function post(path, body, key = process.env.KEY) {
  for (;;) {
    const answer = await fetch(process.env.URL + path, {
      method: "POST",
      headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    if (answer.ok) return answer.json();
    // The engines are full or one was lost; the server returns when to retry.
    const seconds = Number(answer.headers.get("Retry-After"));
    if (!seconds) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

async function play() {
  const session = await post("/sessions", { task_id: question });
  const request = { model: "policy", messages: [{ role: "user", content: question }] };
  const answer = await post(`${session.base_path}/chat/completions`, request, session.api_key);
  const text = answer.choices[0].message.content;
  // The reward is the share of lower-case letters.
  const reward = (text.match(/[a-z]/g) ?? []).length / Math.max(1, text.length);
  const receipt = await post("/feedback", { reward }, session.api_key);
  console.log(JSON.stringify({ ...receipt, reward }));
}

await Promise.all(Array.from({ length: Number(sessions) }, play));
