"use strict";
const root = document.documentElement;
const form = document.getElementById("filters");
const articles = [...document.querySelectorAll("article.finding")];
const count = document.getElementById("count");
const theme = document.getElementById("theme");

// ---- light and dark: what the reader's system says, until the button is pressed
const saved = (value) => {
  try {
    if (value) localStorage.setItem("attn-oracle-theme", value);
    return localStorage.getItem("attn-oracle-theme");
  } catch { return null; }
};
const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const paint = () => {
  theme.setAttribute("aria-pressed", String(dark()));
  theme.textContent = dark() ? "Light colours" : "Dark colours";
};
if (["dark", "light"].includes(saved())) root.dataset.theme = saved();
theme.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  saved(root.dataset.theme);
  paint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
theme.hidden = false;
paint();

// ---- filters: what is chosen is in the address, so that a view can be passed on
const names = ["target", "verdict", "check", "state"];
const visible = () => articles.filter((article) => !article.hidden);
const apply = () => {
  const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const article of articles) {
    const fits = names.every((name) => !form.elements[name].value || article.dataset[name] === form.elements[name].value);
    const text = words.length ? article.textContent.toLowerCase() : "";
    article.hidden = !(fits && words.every((word) => text.includes(word)));
  }
  count.textContent = `${visible().length} of ${articles.length} finding${articles.length === 1 ? "" : "s"} shown`;
  const chosen = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  history.replaceState(null, "", chosen.size ? `#${chosen}` : location.pathname + location.search);
};
const choose = () => {
  if (!location.hash.includes("=")) return;
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const name of [...names, "text"]) form.elements[name].value = asked.get(name) || "";
  apply();
};
if (form) {
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  addEventListener("hashchange", choose);
  const every = (open) => visible().forEach((article) => { article.querySelector("details").open = open; });
  document.getElementById("open").addEventListener("click", () => every(true));
  document.getElementById("close").addEventListener("click", () => every(false));
  choose();
}

// ---- keys, while a finding's heading has the focus: j and k, Home and End go from one to another
document.addEventListener("keydown", (event) => {
  const here = document.activeElement && document.activeElement.closest("article.finding");
  if (!here || event.ctrlKey || event.altKey || event.metaKey || !document.activeElement.matches("summary")) return;
  const shown = visible();
  const at = shown.indexOf(here);
  const next = { j: at + 1, k: at - 1, Home: 0, End: shown.length - 1 }[event.key];
  if (next === undefined || !shown[next]) return;
  event.preventDefault();
  shown[next].querySelector("summary").focus();
});

// ---- on paper everything is open
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((details) => { details.open = true; });
});
addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));
