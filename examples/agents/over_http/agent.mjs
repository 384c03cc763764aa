// The same in JavaScript: node's own fetch, no packages, all sessions side by side.
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
    // The engines are full, or one has just been lost: the server says when to come again.
    const seconds = Number(answer.headers.get("Retry-After"));
    if (!seconds) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

async function play() {
  const session = await post("/sessions", { task_id: question });
  const asked = { model: "policy", messages: [{ role: "user", content: question }] };
  const answer = await post(`${session.base_path}/chat/completions`, asked, session.api_key);
  const said = answer.choices[0].message.content;
  // What the policy is to learn: lower-case letters, and nothing else.
  const reward = (said.match(/[a-z]/g) ?? []).length / Math.max(1, said.length);
  const told = await post("/feedback", { reward }, session.api_key);
  console.log(JSON.stringify({ ...told, reward }));
}

await Promise.all(Array.from({ length: Number(sessions) }, play));
