// A policy at work: shows the tokens of a response while they are written. Without it every page
// works; a turn then appears whole.
"use strict";

const POLL_MS = 120;

// With this field a form is answered at once, and the page follows what is written.
document.addEventListener("formdata", (event) => event.formData.set("live", "1"));

async function newPage() {
  const answer = await fetch("/work" + location.search);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.querySelector("#episode");
  if (!fresh) {
    location.assign("/");
    return;
  }
  const episode = document.querySelector("#episode");
  const focused = episode.contains(document.activeElement);
  episode.replaceWith(fresh);
  document.title = page.title;
  const now = fresh.querySelector("#now");
  document.querySelector("#said").textContent = now.dataset.said;
  if (focused) (fresh.querySelector("#stop") || fresh.querySelector("#act"))?.focus();
  now.scrollIntoView({ block: "nearest" });
}

async function follow() {
  const now = document.querySelector("#now[data-writing]");
  if (now && !document.hidden) {
    try {
      const answer = await fetch("/work/now");
      if (answer.status === 404) location.assign("/");
      if (answer.ok) {
        const { page, html } = await answer.json();
        if (page !== document.querySelector("#episode").dataset.page) await newPage();
        else document.querySelector("#written").innerHTML = html;
      }
    } catch {
      // The server was stopped; it may come back.
    }
  }
  if (document.querySelector("#now[data-writing]")) setTimeout(follow, POLL_MS);
}

// A form leads here: who has pressed its button goes on with the next one.
if (location.hash === "#now") {
  document.querySelector("#said").textContent = document.querySelector("#now").dataset.said;
  (document.querySelector("#stop") || document.querySelector("#act"))?.focus({ preventScroll: true });
}
follow();
