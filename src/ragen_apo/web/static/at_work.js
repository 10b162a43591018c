// A policy at work: sends forms without leaving the page, and shows the tokens of a response while
// they are written. Without it every page works; a turn then appears whole.
"use strict";

const POLL_MS = 120;
const isWriting = () => document.querySelector("#now[data-writing]") !== null;

// Shows the newest state of the episode; who was on one of its buttons goes on with the next one.
function show(html) {
  const page = new DOMParser().parseFromString(html, "text/html");
  const fresh = page.querySelector("#episode");
  if (!fresh) {
    location.reload(); // the visit has ended
    return;
  }
  const episode = document.querySelector("#episode");
  const hadFocus = episode.contains(document.activeElement);
  episode.replaceWith(fresh);
  document.title = page.title;
  const now = fresh.querySelector("#now");
  document.querySelector("#said").textContent = now.dataset.said;
  if (hadFocus) fresh.querySelector("#stop, #act")?.focus({ preventScroll: true });
  now.scrollIntoView({ block: "nearest" });
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  const address = form.getAttribute("action"); // form.action may be a field of this name
  if (!form.closest("#episode") || address === "/begin") return;
  event.preventDefault();
  const fields = new URLSearchParams(new FormData(form, event.submitter));
  fields.set("live", "1"); // answered at once
  try {
    const answer = await fetch(address, { method: "POST", body: fields });
    show(await answer.text());
    follow();
  } catch {
    location.reload(); // the browser says what is wrong
  }
});

let isFollowing = false;

async function follow() {
  if (isFollowing) return;
  isFollowing = true;
  while (isWriting()) {
    try {
      const answer = await fetch("/work/now");
      if (answer.status === 404) location.reload();
      if (answer.ok) {
        const { page, html } = await answer.json();
        const written = document.querySelector("#written");
        if (page !== document.querySelector("#episode").dataset.page) {
          show(await (await fetch("/work" + location.search)).text());
        } else if (written) written.innerHTML = html;
      }
    } catch {
      // The server was stopped; it may come back.
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
  isFollowing = false;
}

follow();
