/* The form of a configuration and the buttons with actions. The server checks the form while the user types, and returns
   its plan and the problems by key. Text is inserted as text, never as markup. */
"use strict";

const WAIT_MS = 250;

async function post(action, body) {
  const answer = await fetch("do", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Rftdask-Action-Token": document.getElementById("form").dataset.actionToken },
    body: JSON.stringify({ do: action, ...body }),
  });
  const result = await answer.json();
  if (!answer.ok) throw new Error(result.error);
  return result;
}

const put = (id, text) => { document.getElementById(id).textContent = text; };

/* Fields that are not empty. */
function filled() {
  const fields = {};
  for (const input of document.querySelectorAll(".key [name]")) if (input.name !== "rest" && input.value.trim()) fields[input.name] = input.value;
  return { fields, rest: document.querySelector("[name=rest]").value };
}

let numChecks = 0;

async function check() {
  const number = ++numChecks;
  const result = await post("form", { ...filled(), gpu: document.getElementById("gpu").value.trim() });
  if (number !== numChecks) return; // outdated: the form has changed since
  for (const key of document.querySelectorAll(".key[data-key]")) {
    const problem = result.problems[key.dataset.key] ?? "";
    key.classList.toggle("wrong", problem !== "");
    key.querySelector(".problem").textContent = problem;
    if (problem) key.closest("details").open = true;
  }
  const wrong = Object.entries(result.problems);
  put("problem", wrong.map(([key, problem]) => (key ? `${key}: ${problem}` : problem)).join("\n"));
  put("warnings", result.warnings.join("\n"));
  put("plan", result.plan);
  put("memory", result.memory);
  put("yaml", result.yaml);
  for (const button of document.querySelectorAll("aside [data-do]")) button.disabled = wrong.length > 0;
  document.body.dataset.checked = String(number);
}

function find() {
  const words = document.getElementById("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const keys of document.querySelectorAll("details.keys")) {
    const members = [...keys.querySelectorAll(".key[data-key]")];
    for (const key of members) key.classList.toggle("hide", !words.every((word) => key.dataset.words.includes(word)));
    const hasMatch = members.some((key) => !key.classList.contains("hide"));
    keys.classList.toggle("hide", words.length > 0 && !hasMatch);
    if (words.length) keys.open = hasMatch;
  }
}

addEventListener("click", async (event) => {
  const button = event.target.closest("[data-do]");
  if (!button) return;
  event.preventDefault();
  button.disabled = true;
  try {
    const of = button.dataset.of ?? document.getElementById("save-as").value.trim();
    const form = button.dataset.of ? {} : { ...filled(), replace: document.getElementById("replace").checked };
    const result = await post(button.dataset.do, { of, ...form });
    put("message", result.message);
  } catch (error) {
    put("message", error.message);
  }
  button.disabled = false;
  await renew();
});

addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form#form");
  // Refresh faster while a command started by this studio is running.
  every(1000, async () => { if (document.querySelector("#started .running")) await renew(); });
  if (!form) return;
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("find").addEventListener("input", find);
  let timer;
  const later = (event) => {
    if (event.target.id === "find") return;
    clearTimeout(timer);
    timer = setTimeout(() => check().catch((error) => put("problem", error.message)), WAIT_MS);
  };
  form.addEventListener("input", later);
  document.getElementById("gpu").addEventListener("input", later);
  check().catch((error) => put("problem", error.message));
});
