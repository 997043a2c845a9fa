package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// Whole sales on the node that TestDemo left up, with real pods, by kubectl.

// kubectl runs kubectl in the node's network.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return inNode(t, append([]string{"kubectl"}, args...)...)
}

// apply gives kubectl a manifest.
func apply(t *testing.T, manifest string) {
	t.Helper()
	file := t.TempDir() + "/manifest.yaml"
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	kubectl(t, "apply", "--server-side", "-f", file) // client-side, a DSN would stand in an annotation
}

// until waits for what kubectl prints of the sale.
func until(t *testing.T, namespace, path, want string, limit time.Duration) {
	t.Helper()
	got := ""
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		if got = kubectl(t, "-n", namespace, "get", "flashsale", "drop", "-o", "jsonpath="+path); got == want {
			return
		}
	}
	t.Fatalf("%s of the sale is %q after %v, want %q\n%s", path, got, limit, want, kubectl(t, "-n", namespace, "describe", "flashsale", "drop"))
}

const readyReason = `{.status.conditions[?(@.type=="Ready")].reason}`

// drops makes a namespace that enforces the restricted standard, with the Secret of the demo's database.
func drops(t *testing.T, namespace string) (dsn string) {
	t.Helper()
	needNode(t)
	if os.Getenv("CLUSTER") == "current" {
		t.Skip("pods of another machine's network cannot be reached from here")
	}
	text, err := os.ReadFile(root + "/dist/demo.dsn")
	if err != nil {
		t.Skip("the node is not up: TestDemo brings it up")
	}
	dsn = strings.TrimSpace(string(text))
	apply(t, fmt.Sprintf(`apiVersion: v1
kind: Namespace
metadata: {name: %[1]s, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: Secret
metadata: {name: sales-db, namespace: %[1]s}
stringData: {dsn: %[2]q}
`, namespace, dsn))
	t.Cleanup(func() { kubectl(t, "delete", "namespace", namespace, "--ignore-not-found", "--timeout=120s") })
	return dsn
}

// drop applies a sale of that name; more are further fields of its spec, as YAML of one line each.
func drop(t *testing.T, namespace string, units int, start time.Time, more ...string) {
	t.Helper()
	apply(t, fmt.Sprintf(`apiVersion: sales.flashsale.dev/v1alpha1
kind: FlashSale
metadata: {name: drop, namespace: %s}
spec:
  sku: drop
  units: %d
  startTime: %q
  database: {secretRef: {name: sales-db}}
  admission: {trustedProxies: [10.0.0.0/8]}
  %s
`, namespace, units, start.UTC().Format(time.RFC3339), strings.Join(more, "\n  ")))
}

// podAddresses gives host:port of the sale's reservation pods.
func podAddresses(t *testing.T, namespace string) (addresses []string) {
	t.Helper()
	out := kubectl(t, "-n", namespace, "get", "pods", "-l", "app.kubernetes.io/component=reserver", "-o", "jsonpath={.items[*].status.podIP}")
	for _, ip := range strings.Fields(out) {
		addresses = append(addresses, ip+":8080")
	}
	return addresses
}

// scaleManager starts or stops the operator.
func scaleManager(t *testing.T, replicas int) {
	t.Helper()
	kubectl(t, "-n", "flashsale-system", "scale", "deployment/flashsale-manager", fmt.Sprint("--replicas=", replicas))
	if replicas == 0 {
		kubectl(t, "-n", "flashsale-system", "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=manager", "--timeout=60s")
	} else {
		kubectl(t, "-n", "flashsale-system", "rollout", "status", "deployment/flashsale-manager", "--timeout=60s")
	}
}

// With the manager away from a minute before the start to a minute after the end, the sale opens and closes by itself.
// The grants are the database's: none before the start, none at or after the end, on any pod. How long after the start
// the first one came is printed for each pod. The node's own autoscaler is at work, too, and has no metrics.
func TestOnTimeWithoutTheManager(t *testing.T) {
	const namespace = "e2e-lonely"
	drops(t, namespace)
	start := time.Now().Add(90 * time.Second).Truncate(time.Second)
	end := start.Add(10 * time.Second)
	drop(t, namespace, 100_000, start, fmt.Sprintf("endTime: %q", end.UTC().Format(time.RFC3339)), "holdTTL: 5s", "reserver: {replicas: 3, warmup: 10m, autoscaling: {maxReplicas: 5}}")
	until(t, namespace, "{.status.reservers.summary}", "3/3", time.Minute)
	time.Sleep(time.Until(start.Add(-time.Minute)))
	scaleManager(t, 0)
	t.Cleanup(func() { scaleManager(t, 1) })
	pods := podAddresses(t, namespace)
	if len(pods) != 3 {
		t.Fatalf("pods %v", pods)
	}
	time.Sleep(time.Until(start.Add(-3 * time.Second)))
	reports := probe(t, probeOrder{Targets: pods, Buyers: 4, Pause: time.Millisecond, Until: end.Add(2 * time.Second)})
	for _, r := range reports {
		t.Logf("%s: first grant %v after the start, last grant %v before the end, by the database's clock; answers %v",
			r.Target, r.FirstGrant.Sub(start), end.Sub(r.LastGrant), r.Answers)
		if r.FirstGrant.Before(start) || !r.LastGrant.Before(end) {
			t.Errorf("%s granted outside of the window", r.Target)
		}
		if r.Answers["403 not-open"] == 0 || r.Answers["201"] == 0 || r.Answers["410 closed"] == 0 || len(r.Errors) != 0 {
			t.Errorf("%s answered %v, errors %v", r.Target, r.Answers, r.Errors)
		}
	}
	time.Sleep(time.Until(end.Add(time.Minute)))
	scaleManager(t, 1)
	until(t, namespace, "{.status.phase}", "Closed", time.Minute)
	until(t, namespace, readyReason, "Ended", time.Second)
	until(t, namespace, "{.status.openedAt}", start.UTC().Format(time.RFC3339), time.Second)
	until(t, namespace, "{.status.inventory.held}", "0", time.Second)
	until(t, namespace, "{.status.audit.passed}", "true", time.Second)
	first, err := time.Parse(time.RFC3339Nano, kubectl(t, "-n", namespace, "get", "flashsale", "drop", "-o", "jsonpath={.status.result.firstGrantAt}"))
	if err != nil || first.Before(start) || first.After(reports[0].FirstGrant) {
		t.Errorf("status.result.firstGrantAt is %v, %v; a pod granted at %v", first, err, reports[0].FirstGrant)
	}
	t.Log(kubectl(t, "-n", namespace, "get", "flashsale", "drop", "-o", "wide"))
	t.Log(kubectl(t, "-n", namespace, "describe", "flashsale", "drop"))
}

// The Secret gets another user while buyers click: pods are replaced one by one, and no request fails.
func TestTheSecretIsRotatedUnderTraffic(t *testing.T) {
	const namespace = "e2e-rotated"
	dsn := drops(t, namespace)
	_, rest, _ := strings.Cut(dsn, "@")
	drop(t, namespace, 1_000_000, time.Now().Add(-time.Second), "reserver: {replicas: 2}")
	until(t, namespace, readyReason, "Live", 2*time.Minute)
	before := podAddresses(t, namespace)
	service := kubectl(t, "-n", namespace, "get", "service", "drop-reserver", "-o", "jsonpath={.spec.clusterIP}") + ":80"
	done := make(chan []probeReport, 1)
	stop := time.Now().Add(50 * time.Second)
	go func() {
		done <- probe(t, probeOrder{Targets: []string{service}, Buyers: 16, Pause: 10 * time.Millisecond, Until: stop})
	}()
	probe(t, probeOrder{DSN: dsn, SQL: []string{"CREATE USER IF NOT EXISTS rotated IDENTIFIED BY 'another'", "GRANT ALL ON *.* TO rotated"}})
	apply(t, fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {name: sales-db, namespace: %s}\nstringData: {dsn: %q}\n", namespace, "rotated:another@"+rest))
	replaced := func() bool {
		now := podAddresses(t, namespace)
		for _, old := range before {
			for _, pod := range now {
				if pod == old {
					return false
				}
			}
		}
		return len(now) == 2
	}
	for !replaced() {
		if time.Now().After(stop) {
			t.Fatalf("pods are still %v", podAddresses(t, namespace))
		}
		time.Sleep(time.Second)
	}
	t.Logf("all pods were replaced %v before the buyers stopped", time.Until(stop).Round(time.Second))
	for _, r := range <-done {
		t.Logf("answers %v", r.Answers)
		if len(r.Errors) > 0 || len(r.Answers) != 1 || r.Answers["201"] < 1000 {
			t.Errorf("requests failed: answers %v, errors %v", r.Answers, r.Errors)
		}
	}
	until(t, namespace, readyReason, "Live", 10*time.Second)
	// The namespace goes first, with live holds in it: it is gone within a minute all the same.
	began := time.Now()
	kubectl(t, "delete", "namespace", namespace, "--timeout=60s")
	t.Logf("the namespace was gone after %v", time.Since(began).Round(time.Second))
}

// What keeps real pods from starting is told in the sale.
func TestWhyPodsDoNotStart(t *testing.T) {
	const namespace = "e2e-pods"
	drops(t, namespace)
	for _, tt := range []struct{ reserver, reason string }{
		{"reserver: {image: \"localhost:1/none:1\"}", "ImageUnavailable"},
		{"reserver: {pod: {nodeSelector: {no: such-node}}}", "Unschedulable"},
		{"reserver: {resources: {requests: {cpu: \"1000\"}}}", "Unschedulable"},
	} {
		drop(t, namespace, 5, time.Now().Add(-time.Second), tt.reserver)
		until(t, namespace, readyReason, tt.reason, 20*time.Second)
		t.Log(kubectl(t, "-n", namespace, "get", "flashsale", "drop", "-o", "jsonpath={.status.message}"))
		kubectl(t, "-n", namespace, "delete", "flashsale", "drop", "--timeout=60s")
	}
}
