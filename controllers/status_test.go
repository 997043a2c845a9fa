package controllers

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/reserver/keys"
	"flashsale.dev/operator/test/testmysql"
)

var update = flag.Bool("update", false, "write the files in testdata anew")

// golden compares text with a file in testdata, or writes it.
func golden(t *testing.T, name, text string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; go test ./controllers -run %s -update writes it", err, t.Name())
	}
	if text != string(want) {
		t.Errorf("%s is now (go test ./controllers -run %s -update, if that is right):\n%s\nwas:\n%s", name, t.Name(), text, want)
	}
}

var (
	instants = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`)
	uuids    = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	pods     = regexp.MustCompile(`(-reserver)-[a-z0-9]{5}\b`)
	spaces   = regexp.MustCompile(`test-[a-z0-9]{5}\b`)
	details  = regexp.MustCompile(`(in the Secret) \([^)]*\)`)
	peaks    = regexp.MustCompile(`(peakClaimsPerSecond): \d+`)
	ages     = regexp.MustCompile(`(?m)\d+[sm](\d+s)?$`)
	headers  = regexp.MustCompile(`MESSAGE +AGE`)
)

// still replaces what differs from run to run.
func still(text string) string {
	text = instants.ReplaceAllStringFunc(text, func(s string) string {
		if strings.Contains(s, ".") {
			return "2026-12-01T04:30:00.001000Z"
		}
		return "2026-12-01T04:30:00Z"
	})
	text = uuids.ReplaceAllString(text, "00000000-0000-4000-8000-000000000000")
	text = pods.ReplaceAllString(text, "$1-x2x2x")
	text = details.ReplaceAllString(text, "$1 (what the driver says)")
	text = peaks.ReplaceAllString(text, "$1: 5")
	return spaces.ReplaceAllString(text, "drops-shop")
}

// story is one sale taken through its life, for the records.
type story struct {
	*world
	table strings.Builder
}

// record writes the object, and the lines that kubectl shows of it.
func (s *story) record(name string, sale *sales.FlashSale) {
	s.t.Helper()
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(sales.GroupVersion.WithKind("FlashSale"))
	if err := k8s.Get(ctx, client.ObjectKeyFromObject(sale), u); err != nil {
		s.t.Fatal(err)
	}
	u.SetManagedFields(nil)
	u.SetResourceVersion("")
	golden(s.t, "objects/"+name+".yaml", still(s.yaml(u)))
	lines := map[string]string{}
	for _, format := range []string{"", "wide"} {
		out, err := kubectl("-n", s.namespace, "get", "fs", sale.Name, "-o", format)
		if err != nil {
			s.t.Fatalf("%v: %s", err, out)
		}
		lines[format] = headers.ReplaceAllString(ages.ReplaceAllString(still(out), "1m"), "MESSAGE   AGE")
	}
	fmt.Fprintf(&s.table, "# %s\n%s%s\n", name, lines[""], lines["wide"])
}

// What kubectl shows of a sale at every phase, and in every kind of trouble, as text that people have looked at
// (testdata/kubectl-get.txt). The objects themselves are recorded too: package hack/gitops asks GitOps tools what they think
// of them.
func TestTheStoryInKubectl(t *testing.T) {
	t.Parallel()
	s := &story{world: newWorld(t)}
	unmanaged := s.makeSale("phones", 5, time.Hour).In(s.world)
	s.record("unseen", unmanaged)
	if err := k8s.Delete(ctx, unmanaged); err != nil {
		t.Fatal(err)
	}
	p := s.proxied()
	s.manage()

	// A sale that sells out.
	sale := s.makeSale("iphone17", 5, 3*time.Hour).Warmup(time.Hour).Ends(4 * time.Hour).In(s.world)
	s.waitFor(sale, sales.PhaseScheduled)
	s.record("scheduled", sale)
	s.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(time.Now().Add(30 * time.Minute)) })
	s.waitFor(sale, sales.PhaseWarming)
	s.record("warming-unready", sale)
	d := &appsv1.Deployment{}
	s.child(d, reserverName(sale))
	pod := s.startPod(d, corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{Name: "serve", Image: "flashsale:none",
		State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "not found"}}}}})
	s.eventually(sale, "the image is missed", func() bool { return readyReason(sale) == sales.ReasonImageUnavailable })
	s.record("image-unavailable", sale)
	if err := k8s.Delete(ctx, pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	s.beKubelet(sale)
	s.eventually(sale, "the pods are ready", func() bool {
		return readyReason(sale) == sales.ReasonWarming && meta.IsStatusConditionTrue(sale.Status.Conditions, sales.ConditionSweeperHealthy)
	})
	s.record("warming", sale)
	s.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(time.Now().Add(-time.Second)) })
	s.waitFor(sale, sales.PhaseLive)
	s.buy(sale, "ann")
	bob := s.claim(sale, "bob").Reservation
	live := func() bool {
		return readyReason(sale) == sales.ReasonLive && *sale.Status.Inventory == sales.InventoryStatus{Loaded: 5, Available: 3, Held: 1, Sold: 1}
	}
	s.eventually(sale, "the counts are shown", live)
	s.record("live", sale)
	s.patch(sale, func() { sale.Spec.Suspend = true })
	s.eventually(sale, "it is suspended", func() bool { return readyReason(sale) == sales.ReasonSuspended })
	s.record("suspended", sale)
	s.patch(sale, func() { sale.Spec.Suspend, sale.Spec.Units = false, 1 })
	s.eventually(sale, "units are in use", func() bool { return readyReason(sale) == sales.ReasonUnitsInUse })
	s.record("units-in-use", sale)
	s.patch(sale, func() { sale.Spec.Units = 5 })
	s.eventually(sale, "it is live again", live)
	p.cut(true)
	s.eventually(sale, "the database is missed", func() bool { return readyReason(sale) == inventory.ReasonUnreachable })
	s.record("database-unreachable", sale)
	p.cut(false)
	s.eventually(sale, "it is live again", live)
	if _, err := testmysql.Confirm(s.store, saleID(sale), bob.ID, "pay-bob"); err != nil {
		t.Fatal(err)
	}
	for _, buyer := range []string{"cat", "dan", "eve"} {
		s.buy(sale, buyer)
	}
	s.waitFor(sale, sales.PhaseClosed)
	s.record("closed-sold-out", sale)
	testmysql.Eventually(t, "the close is told", func() bool { return s.events(sale, corev1.EventTypeNormal)["Closed"] != "" })
	s.describe(sale)

	// One that does not, and is deleted while a hold is live.
	other := s.makeSale("headphones", 5, -time.Second).Ends(time.Hour).In(s.world)
	s.waitFor(other, sales.PhaseLive)
	s.beKubelet(other)
	hold := s.claim(other, "ann").Reservation
	s.patch(other, func() { other.Spec.EndTime = new(metav1.NewTime(time.Now())) })
	s.waitFor(other, sales.PhaseDraining)
	s.eventually(other, "it drains", func() bool {
		return readyReason(other) == sales.ReasonDraining && meta.IsStatusConditionTrue(other.Status.Conditions, sales.ConditionSweeperHealthy)
	})
	s.record("draining", other)
	if err := k8s.Delete(ctx, other); err != nil {
		t.Fatal(err)
	}
	s.eventually(other, "the deletion waits for the hold", func() bool { return strings.Contains(other.Status.Message, "is being deleted") })
	s.record("deleting", other)
	if _, err := testmysql.Release(s.store, saleID(other), hold.ID); err != nil {
		t.Fatal(err)
	}
	s.gone(other)
	ended := s.makeSale("ended", 5, -time.Second).Ends(time.Hour).In(s.world)
	s.waitFor(ended, sales.PhaseLive)
	s.buy(ended, "ann")
	s.patch(ended, func() { ended.Spec.EndTime = new(metav1.NewTime(time.Now())) })
	s.waitFor(ended, sales.PhaseClosed)
	s.record("closed-ended", ended)
	missed := s.makeSale("missed", 5, -time.Hour).Ends(-time.Minute).In(s.world)
	s.waitFor(missed, sales.PhaseClosed)
	s.record("closed-missed", missed)

	// And what needs a person.
	broken := s.makeSale("broken", 2, -time.Second).In(s.world)
	s.waitFor(broken, sales.PhaseLive)
	s.beKubelet(broken)
	s.buy(broken, "ann")
	s.exec("UPDATE flashsale_ledger SET quantity = 2 WHERE sale_id = UUID_TO_BIN(?)", broken.UID)
	s.buy(broken, "bob")
	s.waitFor(broken, sales.PhaseFailed)
	s.record("audit-failed", broken)
	s.exec("UPDATE flashsale_ledger SET quantity = 1 WHERE sale_id = UUID_TO_BIN(?)", broken.UID)
	big := s.makeSale("crowd", 4_000_000, time.Hour).In(s.world)
	s.eventually(big, "loading shows", func() bool { return readyReason(big) == sales.ReasonLoading && big.Status.Inventory != nil })
	s.recordLoading(big)
	lost := s.makeSale("lost", 2, time.Hour).In(s.world)
	s.waitFor(lost, sales.PhaseScheduled)
	if err := s.store.Purge(ctx, saleID(lost)); err != nil {
		t.Fatal(err)
	}
	s.patch(lost, func() { lost.Annotations = map[string]string{"touched": "true"} })
	s.waitFor(lost, sales.PhaseFailed)
	s.record("tables-lost", lost)
	w := &story{world: newWorld(t)}
	if err := k8s.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "sales-db", Namespace: w.namespace}}); err != nil {
		t.Fatal(err)
	}
	w.manage()
	secretless := w.makeSale("secretless", 5, time.Hour).In(w.world)
	w.eventually(secretless, "the Secret is missed", func() bool { return readyReason(secretless) == sales.ReasonSecretNotFound })
	w.record("secret-not-found", secretless)
	w.secret(map[string]string{"dsn": "root@tcp(127.0.0.1:1)/x"})
	w.eventually(secretless, "the server is missed", func() bool { return readyReason(secretless) == inventory.ReasonUnreachable })
	w.record("pending", secretless)
	golden(t, "kubectl-get.txt", s.table.String()+w.table.String())
}

// recordLoading writes a half-loaded sale, how far it is made equal.
func (s *story) recordLoading(sale *sales.FlashSale) {
	s.t.Helper()
	if err := k8s.Delete(ctx, sale); err != nil {
		s.t.Fatal(err)
	}
	u := sale.DeepCopy()
	u.SetGroupVersionKind(sales.GroupVersion.WithKind("FlashSale"))
	u.ManagedFields, u.ResourceVersion = nil, ""
	text := regexp.MustCompile(`\d+ of 4000000|(available|loaded): \d+`).ReplaceAllStringFunc(s.yaml(u), func(count string) string {
		if name, _, found := strings.Cut(count, ": "); found {
			return name + ": 1000000"
		}
		return "1000000 of 4000000"
	})
	golden(s.t, "objects/loading.yaml", still(text))
	s.gone(sale)
}

func (s *story) yaml(o runtime.Object) string {
	s.t.Helper()
	var text bytes.Buffer
	if err := kjson.NewSerializerWithOptions(kjson.DefaultMetaFactory, scheme, scheme, kjson.SerializerOptions{Yaml: true}).Encode(o, &text); err != nil {
		s.t.Fatal(err)
	}
	return text.String()
}

// describe checks what kubectl describe tells to somebody who was asleep.
func (s *story) describe(sale *sales.FlashSale) {
	s.t.Helper()
	out, err := kubectl("-n", s.namespace, "describe", "fs", sale.Name)
	if err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
	_, events, found := strings.Cut(out, "Events:")
	for _, phase := range []string{"Scheduled", "Warming", "ImageUnavailable", "Live", "Suspended", "UnitsInUse", "DatabaseUnreachable", "Reachable", "Closed"} {
		if !strings.Contains(events, phase) {
			s.t.Errorf("the events do not tell of %s", phase)
		}
	}
	for _, want := range []string{"Sold:", "Unsold:", "Refunds Due:", "First Grant At:", "Peak Claims Per Second:", "Sold Out At:", "Closed At:", "Passed:", "5 of 5 units sold; the audit passed"} {
		if !strings.Contains(out, want) {
			s.t.Errorf("it does not tell %q", want)
		}
	}
	if !found || s.t.Failed() {
		s.t.Log(out)
	}
}

// database is the name of the world's database.
func (w *world) database() string {
	_, name, _ := strings.Cut(w.dsn, "/")
	name, _, _ = strings.Cut(name, "?")
	return name
}

// exec changes rows by hand.
func (w *world) exec(query string, args ...any) {
	w.t.Helper()
	query = strings.ReplaceAll(query, "flashsale_", w.database()+".flashsale_")
	if _, err := testmysql.Admin(w.t).ExecContext(ctx, query, args...); err != nil {
		w.t.Fatal(err)
	}
}

// An idle sale, in whatever phase, is looked at again and again, and nothing is written. An hour has six looks; here are
// sixty.
func TestAnIdleSaleWritesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.manage()
	scheduled := w.makeSale("scheduled", 5, 24*time.Hour).In(w)
	suspended := w.makeSale("suspended", 5, 24*time.Hour)
	suspended.Spec.Suspend = true
	suspended.In(w)
	missed := w.makeSale("missed", 5, -time.Hour).Ends(-time.Minute).In(w)
	closed := w.makeSale("closed", 1, -time.Second).In(w)
	w.waitFor(closed, sales.PhaseLive)
	w.buy(closed, "ann")
	w.waitFor(closed, sales.PhaseClosed)
	w.waitFor(missed, sales.PhaseClosed)
	w.waitFor(scheduled, sales.PhaseScheduled)
	w.waitFor(suspended.FlashSale, sales.PhaseScheduled)
	testmysql.Eventually(t, "the pods of the closed one are gone", func() bool { return len(w.children()) == 0 })
	idle := []*sales.FlashSale{scheduled, suspended.FlashSale, missed, closed}
	m.kill() // so that the passes below are the only ones, over what its cache holds
	m = w.manage()
	began := time.Now()
	versions := map[string]string{}
	for _, sale := range idle {
		w.get(sale)
		versions[sale.Name] = sale.ResourceVersion
	}
	testmysql.Eventually(t, "the cache is filled", func() bool {
		list := &sales.FlashSaleList{}
		return m.reconciler.List(ctx, list) == nil && len(list.Items) == len(idle)
	})
	for range 60 {
		for _, sale := range idle {
			result, err := m.reconciler.Reconcile(ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(sale)})
			if err != nil {
				t.Fatal(err)
			}
			if result.RequeueAfter != 0 && result.RequeueAfter < 9*time.Minute {
				t.Errorf("%s is looked at again after %v", sale.Name, result.RequeueAfter)
			}
		}
	}
	if writes := m.written(); len(writes) != 0 {
		t.Errorf("%d writes: %q", len(writes), writes)
	}
	looks := 1 + int64(time.Since(began)/reapplyAfter)
	if reads := m.secretReads.Load(); reads > 2*looks*int64(len(idle)) {
		t.Errorf("%d reads of Secrets", reads)
	}
	for _, sale := range idle {
		if w.get(sale); sale.ResourceVersion != versions[sale.Name] {
			t.Errorf("%s was written", sale.Name)
		}
	}
}

// Fifty edits a second of one object: two status writes of a pass conflicted, and a status was lost.
func TestCaseK29(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.manage()
	sale := w.makeSale("k29", 5, time.Hour).In(w)
	w.waitFor(sale, sales.PhaseScheduled)
	before := len(m.written())
	const edits = 100
	tick := time.NewTicker(time.Second / 50)
	defer tick.Stop()
	for i := range edits {
		<-tick.C
		w.patch(sale, func() { sale.Spec.HoldTTL.Duration = time.Duration(i+1) * time.Second })
	}
	w.seenSpec(sale)
	snap, err := w.store.Snapshot(ctx, saleID(sale))
	if err != nil || snap.HoldTTL != edits*time.Second || readyReason(sale) != sales.ReasonScheduled || snap.Generation != sale.Generation {
		t.Errorf("the row is %+v, %v; status %+v", snap, err, sale.Status)
	}
	writes := m.written()[before:]
	if len(writes) > edits {
		t.Errorf("%d writes for %d edits", len(writes), edits)
	}
	for _, write := range writes {
		if write != "PATCH flashsales/k29/status" && write != "POST events" {
			t.Errorf("a write %q", write)
		}
	}
}

// kubectl wait is never satisfied by what was said of an older spec, nor before anything was said.
func TestKubectlWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sale := w.makeSale("waited", 5, time.Hour).In(w)
	ready := func(timeout string) error {
		out, err := kubectl("-n", w.namespace, "wait", "--for=condition=Ready", "fs/waited", "--timeout="+timeout)
		if err != nil && !strings.Contains(out, "timed out") {
			t.Errorf("%v: %s", err, out)
		}
		return err
	}
	if ready("1s") == nil {
		t.Error("ready before anybody looked")
	}
	m := w.manage()
	if err := ready("60s"); err != nil {
		t.Error(err)
	}
	w.waitFor(sale, sales.PhaseScheduled)
	m.kill()
	w.patch(sale, func() { sale.Spec.Units = 6 })
	if ready("1s") == nil {
		t.Error("ready by an older generation")
	}
	w.manage()
	if err := ready("60s"); err != nil {
		t.Error(err)
	}
	if w.get(sale); sale.Status.ObservedGeneration != sale.Generation || sale.Status.Inventory.Loaded != 6 {
		t.Errorf("ready with %+v", sale.Status)
	}
}

// What was applied is what is there: no tool that compares the two sees a difference that the controller made.
func TestKubectlDiffShowsNothing(t *testing.T) {
	t.Parallel()
	for _, side := range []string{"--server-side=false", "--server-side=true"} {
		w := newWorld(t)
		w.manage()
		manifest := fmt.Sprintf(`apiVersion: sales.flashsale.dev/v1alpha1
kind: FlashSale
metadata: {name: diffed, namespace: %s, labels: {team: drops}}
spec:
  sku: diffed
  units: 2
  startTime: %q
  holdTTL: 10m
  database: {secretRef: {name: sales-db}}
  admission: {trustedProxies: [10.0.0.0/8]}
`, w.namespace, time.Now().Add(-time.Second).Format("2006-01-02T15:04:05-07:00"))
		file := filepath.Join(t.TempDir(), "sale.yaml")
		if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
			t.Fatal(err)
		}
		same := func(when string) {
			t.Helper()
			if out, err := kubectl("diff", side, "-f", file); err != nil || out != "" {
				t.Errorf("%s, %s, kubectl diff shows: %v\n%s", side, when, err, out)
			}
		}
		if out, err := kubectl("apply", side, "-f", file); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		sale := &sales.FlashSale{ObjectMeta: metav1.ObjectMeta{Name: "diffed", Namespace: w.namespace}}
		w.waitFor(sale, sales.PhaseLive)
		same("live")
		w.buy(sale, "ann")
		w.buy(sale, "bob")
		w.waitFor(sale, sales.PhaseClosed)
		same("closed")
		if out, err := kubectl("apply", side, "-f", file); err != nil || !strings.Contains(out, "unchanged") && side == "--server-side=false" {
			t.Errorf("applied again from git: %v: %s", err, out)
		}
	}
}

// The manager's role is what the markers say: nothing by wildcard, Secrets only by name, no write to a spec.
func TestLeastPrivilege(t *testing.T) {
	files, err := filepath.Glob("../config/rbac/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules := 0
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, document := range bytes.Split(text, []byte("\n---\n")) {
			role := &rbacv1.ClusterRole{}
			if err := yaml.Unmarshal(document, role); err != nil {
				t.Fatalf("%s: %v", f, err)
			}
			for _, rule := range role.Rules {
				rules++
				all := slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs, rule.NonResourceURLs)
				if slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, "*") }) {
					t.Errorf("%s: a wildcard in %+v", f, rule)
				}
				if slices.Contains(rule.Resources, "secrets") && !slices.Equal(rule.Verbs, []string{"create", "delete", "get", "update"}) {
					t.Errorf("%s: %s of Secrets", f, rule.Verbs)
				}
			}
		}
	}
	if rules < 8 {
		t.Errorf("%d rules were found", rules)
	}
	for _, allowed := range []struct {
		want bool
		args []string
	}{
		{true, []string{"get", "secrets/sales-db"}}, {false, []string{"list", "secrets"}}, {false, []string{"watch", "secrets"}},
		{true, []string{"create", "secrets"}}, {true, []string{"update", "secrets/x-checkout"}}, {true, []string{"delete", "secrets/x-checkout"}},
		{false, []string{"patch", "secrets/x-checkout"}}, {false, []string{"deletecollection", "secrets"}},
		{true, []string{"patch", "flashsales/x", "--subresource=status"}}, {false, []string{"delete", "flashsales/x"}}, {false, []string{"update", "flashsales/x"}},
		{false, []string{"create", "pods"}}, {false, []string{"create", "pods", "--subresource=exec"}}, {true, []string{"create", "deployments.apps"}}, {false, []string{"create", "roles"}},
	} {
		out, err := kubectl(append([]string{"-n", "default", "auth", "can-i", "--as=system:serviceaccount:flashsale-system:flashsale-manager"}, allowed.args...)...)
		if got := err == nil; got != allowed.want {
			t.Errorf("can the manager %q? %s, want %t", allowed.args, strings.TrimSpace(out), allowed.want)
		}
	}
}

// The credentials appear nowhere: not in an object, an event, a log line, a metric or an argument of a process.
func TestSecretsStaySecret(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const password, key = "Pa55-n0where", "whsec_c2VjcmV0IG9mIHRoZSB3ZWJob29rIGluIHRlc3Rz"
	user := "s" + strings.ReplaceAll(w.namespace, "-", "")
	admin := testmysql.Admin(t)
	for _, q := range []string{"CREATE USER " + user + " IDENTIFIED BY '" + password + "'", "GRANT ALL ON *.* TO " + user} {
		if _, err := admin.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _, _ = admin.ExecContext(ctx, "DROP USER "+user) })
	dsn := strings.Replace(w.dsn, "root@", user+":"+password+"@", 1)
	w.secret(map[string]string{"dsn": dsn})
	if err := k8s.Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "hook", Namespace: w.namespace}, StringData: map[string]string{"secret": key}}); err != nil {
		t.Fatal(err)
	}
	process := w.startProcess(nil, "--leader-elect=false")
	build := w.makeSale("secret", 2, -time.Second)
	build.Spec.Webhook = &sales.WebhookSpec{URL: "https://shop.example/hook", SecretRef: sales.SecretReference{Name: "hook"}}
	sale := build.In(w)
	w.waitFor(sale, sales.PhaseLive)
	w.secret(map[string]string{"dsn": user + ":" + password + "@nowhere"}) // not a DSN
	w.eventually(sale, "the fault is told", func() bool { return readyReason(sale) == inventory.ReasonInvalidDSN })
	w.secret(map[string]string{"dsn": strings.Replace(dsn, password, password+"x", 1)}) // refused by the server
	w.eventually(sale, "the fault is told", func() bool { return readyReason(sale) == inventory.ReasonAccessDenied })
	w.secret(map[string]string{"dsn": dsn})
	w.eventually(sale, "it goes on", func() bool { return readyReason(sale) == sales.ReasonUnavailable })
	first := w.keys(sale)
	w.patch(sale, func() { sale.Spec.Admission.KeyGeneration = 1 })
	testmysql.Eventually(t, "the keys are rotated", func() bool { return w.keys(sale).Generation == 1 })
	second := w.keys(sale)
	w.patchKeys(sale, func(secret *corev1.Secret) { // not keys any more
		secret.Data[keys.FileName] = append([]byte("not keys: "), secret.Data[keys.FileName]...)
	})
	w.eventually(sale, "the fault is told", func() bool { return readyReason(sale) == sales.ReasonKeysInvalid })
	hidden := []string{password, key, user + ":"}
	for _, pair := range []keys.Pair{first.Current, first.Next, second.Next} {
		hidden = append(hidden, pair.CheckoutToken, pair.SigningSeed)
	}
	hidden = append(hidden, "fsc_")

	places := map[string]string{"log": logged.String()}
	for _, file := range []string{"cmdline", "environ"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", process.Process.Pid, file))
		if err != nil {
			t.Fatal(err)
		}
		places["the process's "+file] = string(text)
	}
	gathered, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	places["metrics"] = fmt.Sprint(gathered)
	objects := 0
	known, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	resources, err := known.ServerPreferredNamespacedResources()
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range resources {
		for _, r := range group.APIResources {
			if !slices.Contains(r.Verbs, "list") || r.Kind == "Secret" {
				continue
			}
			list := &unstructured.UnstructuredList{}
			list.SetAPIVersion(group.GroupVersion)
			list.SetKind(r.Kind)
			if err := k8s.List(ctx, list, client.InNamespace(w.namespace)); err != nil {
				continue // some kinds cannot be listed though they say so
			}
			objects += len(list.Items)
			text, err := json.Marshal(list.Items)
			if err != nil {
				t.Fatal(err)
			}
			places[r.Kind] += string(text)
		}
	}
	if objects < 10 || !strings.Contains(places["Event"], inventory.ReasonAccessDenied) || !strings.Contains(places["log"], "did the database's part") {
		t.Errorf("looked at %d objects and %d places only", objects, len(places))
	}
	for place, text := range places {
		for _, secret := range hidden {
			if strings.Contains(text, secret) {
				t.Errorf("%q appears in %s", secret, place)
			}
		}
	}
}

// Whoever reads a reason in a condition finds in docs/lifecycle.md what to do.
func TestEveryReasonIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/lifecycle.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("../reserver/inventory/*.go")
	if err != nil {
		t.Fatal(err)
	}
	reasons := 0
	for _, f := range append(files, "../api/v1alpha1/conditions.go") {
		source, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range regexp.MustCompile(`(?m)^\s+Reason[A-Za-z]+\s+= "(\w+)"`).FindAllSubmatch(source, -1) {
			reasons++
			if !bytes.Contains(text, found[1]) {
				t.Errorf("docs/lifecycle.md does not tell what to do about %s", found[1])
			}
		}
	}
	if reasons < 40 {
		t.Errorf("%d reasons were found", reasons)
	}
}
