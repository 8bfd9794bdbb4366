"use strict";
// In a frame the page around says light or dark, and is told how high the walk is.
if (document.documentElement.dataset.embed && window.parent !== window) {
  const tell = () => window.parent.postMessage({ walkHeight: Math.ceil(document.querySelector("main").getBoundingClientRect().bottom + window.scrollY) }, "*");
  window.addEventListener("message", (event) => {
    const choice = document.getElementById("theme"), theme = event.source === window.parent && event.data && event.data.walkTheme;
    if (!["light", "dark"].includes(theme) || choice.value === theme) return;
    choice.value = theme;
    choice.dispatchEvent(new Event("change"));
  });
  new ResizeObserver(tell).observe(document.querySelector("main"));
  tell();
}
