package controllers

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// The tests here run the controller against a real API server and a real MySQL. What envtest lacks is a node: a test
// plays the kubelet by writing the Deployments' status.

var (
	cfg    *rest.Config
	k8s    client.Client
	scheme = runtime.NewScheme()
	ctx    = context.Background()
	logged lockedBuffer
)

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	ctrl.SetLogger(zap.New(zap.WriteTo(&logged)))
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		cmd := exec.Command("../hack/envtest.sh")
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			fmt.Fprintln(os.Stderr, "no API server for tests:", err)
			return 1
		}
		if err := os.Setenv("KUBEBUILDER_ASSETS", strings.TrimSpace(string(out))); err != nil {
			return 1
		}
	}
	env := &envtest.Environment{CRDDirectoryPaths: []string{filepath.Join("..", "config", "crd", "bases")}, ErrorIfCRDPathMissing: true}
	var err error
	if cfg, err = env.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "starting the API server:", err)
		return 1
	}
	defer func() { _ = env.Stop() }()
	cfg.QPS, cfg.Burst = 200, 400
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, sales.AddToScheme} {
		if err := add(scheme); err != nil {
			return 1
		}
	}
	if k8s, err = client.New(cfg, client.Options{Scheme: scheme}); err != nil {
		return 1
	}
	code := m.Run()
	if code != 0 && os.Getenv("FLASHSALE_TEST_LOG") != "" {
		fmt.Fprintln(os.Stderr, logged.b.String())
	}
	return code
}

// world is a namespace of its own with a database of its own and a Secret that names it.
type world struct {
	t         *testing.T
	namespace string
	dsn       string
	store     *inventory.Store
}

func newWorld(t *testing.T) *world {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	if err := k8s.Create(ctx, ns); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, namespace: ns.Name, dsn: testmysql.DSN(t)}
	w.store = testmysql.Open(t, w.dsn)
	w.secret(map[string]string{"dsn": w.dsn})
	return w
}

func (w *world) secret(data map[string]string) {
	w.t.Helper()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "sales-db", Namespace: w.namespace}}
	_, err := ctrl.CreateOrUpdate(ctx, k8s, secret, func() error {
		secret.Data = map[string][]byte{}
		for k, v := range data {
			secret.Data[k] = []byte(v)
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// manage runs a controller for the namespace, and gives a function that kills it: its work is cut off where it stands.
func (w *world) manage() (kill func()) {
	w.t.Helper()
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		Controller:              config.Controller{SkipNameValidation: new(true)},
		GracefulShutdownTimeout: new(10 * time.Second),
		Cache: cache.Options{DefaultNamespaces: map[string]cache.Config{w.namespace: {}},
			ByObject: map[client.Object]cache.ByObject{
				&appsv1.Deployment{}: {Label: labels.SelectorFromSet(ManagedLabel)},
				&corev1.Service{}:    {Label: labels.SelectorFromSet(ManagedLabel)},
			}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	r := &FlashSaleReconciler{Client: mgr.GetClient(), Direct: mgr.GetAPIReader(), Events: mgr.GetEventRecorder("flashsale-manager"),
		Databases: NewDatabases(), Image: "flashsale:test"}
	if err := r.SetupWithManager(mgr); err != nil {
		w.t.Fatal(err)
	}
	running, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := mgr.Start(running); err != nil {
			w.t.Errorf("the manager ended: %v", err)
		}
	})
	kill = func() { cancel(); wg.Wait() }
	w.t.Cleanup(kill)
	return kill
}

// saleBuilder builds a FlashSale for a test.
type saleBuilder struct{ *sales.FlashSale }

// makeSale begins a sale that starts after a time and has no end, two pods and a hold of 10 minutes.
func (w *world) makeSale(name string, units int32, startsIn time.Duration) *saleBuilder {
	return &saleBuilder{&sales.FlashSale{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: w.namespace},
		Spec: sales.FlashSaleSpec{SKU: name, Units: units, StartTime: metav1.NewTime(time.Now().Add(startsIn).Truncate(time.Second)),
			HoldTTL:  metav1.Duration{Duration: 10 * time.Minute},
			Database: sales.DatabaseSpec{SecretRef: sales.SecretReference{Name: "sales-db"}},
			Reserver: sales.ReserverSpec{Warmup: metav1.Duration{Duration: time.Minute}},
			Sweep:    sales.SweepSpec{Interval: metav1.Duration{Duration: time.Second}}},
	}}
}

func (b *saleBuilder) Warmup(d time.Duration) *saleBuilder {
	b.Spec.Reserver.Warmup.Duration = d
	return b
}
func (b *saleBuilder) TTL(d time.Duration) *saleBuilder { b.Spec.HoldTTL.Duration = d; return b }
func (b *saleBuilder) Ends(after time.Duration) *saleBuilder {
	b.Spec.EndTime = new(metav1.NewTime(time.Now().Add(after)))
	return b
}
func (b *saleBuilder) Policy(p sales.DeletionPolicy) *saleBuilder {
	b.Spec.DeletionPolicy = p
	return b
}

// In creates the sale.
func (b *saleBuilder) In(w *world) *sales.FlashSale {
	w.t.Helper()
	if err := k8s.Create(ctx, b.FlashSale); err != nil {
		w.t.Fatal(err)
	}
	id := saleID(b.FlashSale)
	w.t.Cleanup(func() {
		// A sale that loaded nothing, or was deleted with its rows, has nothing to audit.
		if _, err := w.store.Snapshot(ctx, id); err == nil {
			testmysql.Audit(w.t, w.store, id)
		}
	})
	return b.FlashSale
}

// get reads the sale anew; false if it is gone.
func (w *world) get(sale *sales.FlashSale) bool {
	w.t.Helper()
	err := k8s.Get(ctx, client.ObjectKeyFromObject(sale), sale)
	if client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	return err == nil
}

// eventually reads the sale until done says so; what names the condition.
func (w *world) eventually(sale *sales.FlashSale, what string, done func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(90 * time.Second)
	for {
		there := w.get(sale)
		if there {
			w.checkStatus(sale)
		}
		if there && done() {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("not in time: %s; status %+v", what, sale.Status)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (w *world) waitFor(sale *sales.FlashSale, phase sales.Phase) {
	w.t.Helper()
	w.eventually(sale, "phase "+string(phase), func() bool { return sale.Status.Phase == phase })
}

func (w *world) gone(sale *sales.FlashSale) {
	w.t.Helper()
	testmysql.Eventually(w.t, "the object is gone", func() bool { return !w.get(sale) })
}

// checkStatus asserts the rules of conditions on every status that a test sees.
func (w *world) checkStatus(sale *sales.FlashSale) {
	w.t.Helper()
	if sale.Status.ObservedGeneration <= 0 {
		return // not seen yet
	}
	ready := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionReady)
	if ready == nil {
		w.t.Fatalf("a status without Ready: %+v", sale.Status)
	}
	trouble := 0
	for _, kind := range []string{sales.ConditionReconciling, sales.ConditionStalled} {
		if c := meta.FindStatusCondition(sale.Status.Conditions, kind); c != nil {
			trouble++
			if c.Status != metav1.ConditionTrue {
				w.t.Errorf("%s is present and %s", kind, c.Status)
			}
		}
	}
	if want := map[metav1.ConditionStatus]int{metav1.ConditionTrue: 0, metav1.ConditionFalse: 1}[ready.Status]; trouble != want {
		w.t.Errorf("Ready is %s with %d of Reconciling and Stalled", ready.Status, trouble)
	}
	for _, c := range sale.Status.Conditions {
		if c.Reason == "" || c.ObservedGeneration == 0 {
			w.t.Errorf("condition without reason or generation: %+v", c)
		}
	}
}

func readyReason(sale *sales.FlashSale) string {
	if c := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionReady); c != nil {
		return c.Reason
	}
	return ""
}

// beKubelet makes the pods of the sale's Deployments ready.
func (w *world) beKubelet(sale *sales.FlashSale) {
	w.t.Helper()
	for _, name := range []string{reserverName(sale), sweeperName(sale)} {
		d := &appsv1.Deployment{}
		testmysql.Eventually(w.t, "Deployment "+name+" exists", func() bool {
			return k8s.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, d) == nil
		})
		before := d.DeepCopy()
		d.Status.Replicas, d.Status.ReadyReplicas, d.Status.AvailableReplicas = *d.Spec.Replicas, *d.Spec.Replicas, *d.Spec.Replicas
		if err := k8s.Status().Patch(ctx, d, client.MergeFrom(before)); err != nil {
			w.t.Fatal(err)
		}
	}
}

// children counts the sale's Deployments and Services.
func (w *world) children() int {
	w.t.Helper()
	deployments, services := &appsv1.DeploymentList{}, &corev1.ServiceList{}
	for _, list := range []client.ObjectList{deployments, services} {
		if err := k8s.List(ctx, list, client.InNamespace(w.namespace), client.MatchingLabels(ManagedLabel)); err != nil {
			w.t.Fatal(err)
		}
	}
	return len(deployments.Items) + len(services.Items)
}

// events gives the reasons of the sale's events of a type.
func (w *world) events(sale *sales.FlashSale, kind string) map[string]string {
	w.t.Helper()
	list := &eventsv1.EventList{}
	if err := k8s.List(ctx, list, client.InNamespace(w.namespace)); err != nil {
		w.t.Fatal(err)
	}
	notes := map[string]string{}
	for _, e := range list.Items {
		if e.Regarding.UID == sale.UID && e.Type == kind {
			notes[e.Reason] = e.Note
		}
	}
	return notes
}

// claim reserves a unit, as a pod would.
func (w *world) claim(sale *sales.FlashSale, buyer string) inventory.Result {
	w.t.Helper()
	results, err := w.store.Claim(ctx, saleID(sale), inventory.NewLine("test-"+buyer), []inventory.Request{{Buyer: buyer, Quantity: 1}})
	if err != nil {
		w.t.Fatal(err)
	}
	return results[0]
}

// buy reserves and pays.
func (w *world) buy(sale *sales.FlashSale, buyer string) {
	w.t.Helper()
	r := w.claim(sale, buyer)
	if r.Outcome != inventory.OutcomeHeld {
		w.t.Fatalf("%s got %v", buyer, r.Outcome)
	}
	if _, err := testmysql.Confirm(w.store, saleID(sale), r.Reservation.ID, "pay-"+buyer); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) patch(sale *sales.FlashSale, change func()) {
	w.t.Helper()
	w.get(sale)
	before := sale.DeepCopy()
	change()
	if err := k8s.Patch(ctx, sale, client.MergeFrom(before)); err != nil {
		w.t.Fatal(err)
	}
}

// dropFinalizer plays the garbage collector, which envtest lacks: its finalizer goes once ours is gone.
func (w *world) dropFinalizer(sale *sales.FlashSale, name string) {
	w.t.Helper()
	w.eventually(sale, "only the garbage collector's finalizer is left", func() bool {
		return len(sale.Finalizers) == 1 && sale.Finalizers[0] == name
	})
	w.patch(sale, func() { sale.Finalizers = nil })
}
