import type { JSX } from "preact";
import { Empty, Page } from "./ui";
export function Requests(): JSX.Element {
  return (
    <Page title="Requests">
      <Empty title="Nothing yet" />
    </Page>
  );
}
