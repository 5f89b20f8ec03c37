// The console: a page for people in front of one Penstock server.
import { render } from "preact";
import { Shell } from "./shell";
import { connect } from "./store";
import "./style.css";

const root = document.getElementById("app")!;
root.textContent = "";
render(<Shell />, root);
void connect();
