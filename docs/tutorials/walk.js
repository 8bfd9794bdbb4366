"use strict";
// Around the walk: the frame is as high as what it shows, and has the colours of the page.
for (const frame of document.querySelectorAll("iframe.tw-walk")) {
  const dress = () => frame.contentWindow.postMessage({ walkTheme: document.body.dataset.mdColorScheme === "slate" ? "dark" : "light" }, "*");
  window.addEventListener("message", (event) => {
    if (event.source !== frame.contentWindow || !(event.data && event.data.walkHeight > 0)) return;
    frame.style.height = event.data.walkHeight + frame.offsetHeight - frame.clientHeight + "px"; // with its border
    dress();
  });
  new MutationObserver(dress).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
}
