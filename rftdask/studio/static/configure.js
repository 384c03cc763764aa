/* The form of a configuration, and the buttons that act: what is typed is sent to the server, which says what it comes to
   and what is wrong, key by key. Text goes to the page as text alone. */
"use strict";

const WAIT_MS = 250;

async function ask(what, more) {
  const answer = await fetch("do", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Rftdask-Asking": document.getElementById("form").dataset.asking },
    body: JSON.stringify({ do: what, ...more }),
  });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
}

const put = (id, text) => { document.getElementById(id).textContent = text; };

/* Every field that says something. */
function filled() {
  const fields = {};
  for (const input of document.querySelectorAll(".key [name]")) if (input.name !== "rest" && input.value.trim()) fields[input.name] = input.value;
  return { fields, rest: document.querySelector("[name=rest]").value };
}

let asked = 0;

async function look() {
  const number = ++asked;
  const told = await ask("form", { ...filled(), gpu: document.getElementById("gpu").value.trim() });
  if (number !== asked) return; // something was typed since
  for (const key of document.querySelectorAll(".key[data-key]")) {
    const problem = told.problems[key.dataset.key] ?? "";
    key.classList.toggle("wrong", problem !== "");
    key.querySelector(".problem").textContent = problem;
    if (problem) key.closest("details").open = true;
  }
  const wrong = Object.entries(told.problems);
  put("problem", wrong.map(([key, problem]) => (key ? `${key}: ${problem}` : problem)).join("\n"));
  put("warnings", told.warnings.join("\n"));
  put("plan", told.plan);
  put("memory", told.memory);
  put("yaml", told.yaml);
  for (const button of document.querySelectorAll("aside [data-do]")) button.disabled = wrong.length > 0;
  document.body.dataset.looked = String(number);
}

function find() {
  const words = document.getElementById("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const keys of document.querySelectorAll("details.keys")) {
    const own = [...keys.querySelectorAll(".key[data-key]")];
    for (const key of own) key.classList.toggle("hide", !words.every((word) => key.dataset.words.includes(word)));
    const found = own.some((key) => !key.classList.contains("hide"));
    keys.classList.toggle("hide", words.length > 0 && !found);
    if (words.length) keys.open = found;
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
    const told = await ask(button.dataset.do, { of, ...form });
    put("said", told.said);
  } catch (error) {
    put("said", error.message);
  }
  button.disabled = false;
  await renew();
});

addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form#form");
  // Faster than the rest of a page while something that was started here has just begun.
  every(1000, async () => { if (document.querySelector("#started .running")) await renew(); });
  if (!form) return;
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("find").addEventListener("input", find);
  let timer;
  const later = (event) => {
    if (event.target.id === "find") return;
    clearTimeout(timer);
    timer = setTimeout(() => look().catch((error) => put("problem", error.message)), WAIT_MS);
  };
  form.addEventListener("input", later);
  document.getElementById("gpu").addEventListener("input", later);
  look().catch((error) => put("problem", error.message));
});
