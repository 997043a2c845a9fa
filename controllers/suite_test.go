package controllers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
	"flashsale.dev/operator/test/teststatus"
)

// The tests here run the controller against a real API server and a real MySQL, under the rights of its own
// ServiceAccount. What envtest lacks is a node: a test plays the kubelet by writing the Deployments' status.

var (
	cfg        *rest.Config
	k8s        client.Client
	scheme     = runtime.NewScheme()
	ctx        = context.Background()
	logged     lockedBuffer
	kubeconfig string // of an administrator, for kubectl
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

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	ctrl.SetLogger(zap.New(zap.WriteTo(&logged)))
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		assets, err := output("../hack/envtest.sh")
		if err != nil {
			return 1, fmt.Errorf("no API server for tests: %w", err)
		}
		if err := os.Setenv("KUBEBUILDER_ASSETS", strings.TrimSpace(string(assets))); err != nil {
			return 1, err
		}
	}
	gateway, err := output("go", "-C", "../hack/gitops", "mod", "download", "-json", "sigs.k8s.io/gateway-api")
	if err != nil {
		return 1, fmt.Errorf("no CRDs of the Gateway API: %w", err)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(gateway, &module); err != nil {
		return 1, err
	}
	env := &envtest.Environment{CRDDirectoryPaths: []string{filepath.Join("..", "config", "crd", "bases"),
		filepath.Join(module.Dir, "config", "crd", "standard", "gateway.networking.k8s.io_httproutes.yaml")}, ErrorIfCRDPathMissing: true}
	if cfg, err = env.Start(); err != nil {
		return 1, fmt.Errorf("starting the API server: %w", err)
	}
	defer func() { _ = env.Stop() }()
	cfg.QPS, cfg.Burst = 200, 400
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), sales.AddToScheme(scheme)); err != nil {
		return 1, err
	}
	if k8s, err = client.New(cfg, client.Options{Scheme: scheme}); err != nil {
		return 1, err
	}
	admin, err := env.AddUser(envtest.User{Name: "kubectl", Groups: []string{"system:masters"}}, cfg)
	if err != nil {
		return 1, err
	}
	config, err := admin.KubeConfig()
	if err != nil {
		return 1, err
	}
	folder, err := os.MkdirTemp("", "flashsale-test-")
	if err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	kubeconfig = filepath.Join(folder, "kubeconfig")
	if err := os.WriteFile(kubeconfig, config, 0o600); err != nil {
		return 1, err
	}
	managerBinary.path = filepath.Join(folder, "manager")
	// The operator's own namespace and rights, as they are installed.
	if err := k8s.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "flashsale-system"}}); err != nil {
		return 1, err
	}
	if out, err := kubectl("apply", "-k", "../config/rbac"); err != nil {
		return 1, fmt.Errorf("%w: %s", err, out)
	}
	// Tests wait more than they work.
	if err := flag.Set("test.parallel", "8"); err != nil {
		return 1, err
	}
	code = m.Run()
	if code != 0 && os.Getenv("FLASHSALE_TEST_LOG") != "" {
		fmt.Fprintln(os.Stderr, logged.String())
	}
	return code, nil
}

func output(name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	return cmd.Output()
}

// kubectl runs the real one, as an administrator.
func kubectl(args ...string) (string, error) {
	cmd := exec.Command(filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kubectl"), append([]string{"--kubeconfig", kubeconfig}, args...)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// world is a namespace of its own with a database of its own and a Secret that names it.
type world struct {
	t         *testing.T
	namespace string
	dsn       string
	store     *inventory.Store
	applied   int // objects that refused made
}

func newWorld(t *testing.T) *world {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-",
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}}
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

// managed is a controller that runs, for one namespace.
type managed struct {
	reconciler *FlashSaleReconciler
	// step, if set, sees each write to the API server and each work in the database. It returns what is to be done instead
	// of the write, if anything.
	step func(what string, write func() (*http.Response, error)) (*http.Response, error)

	secretReads atomic.Int64 // of the controller's own Secrets

	mu     sync.Mutex
	writes []string
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// kill cuts the controller's work off where it stands.
func (m *managed) kill() { m.cancel(); m.done.Wait() }

// written gives what was written to the API server so far.
func (m *managed) written() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.writes)
}

// RoundTrip stands between the controller and the API server.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (m *managed) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			if strings.Contains(r.URL.Path, "/secrets/") && !strings.HasSuffix(r.URL.Path, "/sales-db") {
				m.secretReads.Add(1)
			}
			return next.RoundTrip(r)
		}
		_, path, _ := strings.Cut(r.URL.Path, "/namespaces/")
		what := r.Method + " " + path[strings.Index(path, "/")+1:]
		m.mu.Lock()
		m.writes = append(m.writes, what)
		m.mu.Unlock()
		write := func() (*http.Response, error) { return next.RoundTrip(r) }
		if m.step == nil {
			return write()
		}
		return m.step(what, write)
	})
}

// Write gets the log, line by line.
func (m *managed) Write(line []byte) (int, error) {
	var entry struct{ Work, Msg string }
	if m.step != nil && json.Unmarshal(line, &entry) == nil && entry.Work != "" {
		_, _ = m.step("work "+entry.Work, func() (*http.Response, error) { return nil, nil })
	}
	return logged.Write(line)
}

// asManager gives the rights of the manager's ServiceAccount.
func asManager() *rest.Config {
	c := rest.CopyConfig(cfg)
	c.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:flashsale-system:flashsale-manager",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:flashsale-system", "system:authenticated"}}
	return c
}

// manage runs a controller for the namespace until the test ends, or kill.
func (w *world) manage(changes ...func(*managed)) *managed {
	w.t.Helper()
	m := &managed{reconciler: &FlashSaleReconciler{Databases: NewDatabases(), HTTPRoutes: true, Image: "flashsale:test"}}
	for _, change := range changes {
		change(m)
	}
	config := asManager()
	config.Wrap(m.wrap)
	options := ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		Logger:                  zap.New(zap.WriteTo(m)),
		Controller:              ctrlconfig.Controller{SkipNameValidation: new(true)},
		GracefulShutdownTimeout: new(10 * time.Second),
		Cache:                   cache.Options{DefaultNamespaces: map[string]cache.Config{w.namespace: {}}, ByObject: Cached(true)},
	}
	mgr, err := ctrl.NewManager(config, options)
	if err != nil {
		w.t.Fatal(err)
	}
	m.reconciler.Client, m.reconciler.Direct, m.reconciler.Events = mgr.GetClient(), mgr.GetAPIReader(), mgr.GetEventRecorder("flashsale-manager")
	if err := m.reconciler.SetupWithManager(mgr); err != nil {
		w.t.Fatal(err)
	}
	running, cancel := context.WithCancel(ctx)
	m.cancel = cancel
	m.done.Go(func() {
		if err := mgr.Start(running); err != nil && running.Err() == nil {
			w.t.Errorf("the manager ended: %v", err)
		}
	})
	w.t.Cleanup(m.kill)
	return m
}

// managerBinary is the program itself, built once, for what only a process of its own can show.
var managerBinary struct {
	once sync.Once
	path string
	err  error
}

// startProcess runs the manager as a process, for the namespace, until the test ends.
func (w *world) startProcess(env []string, flags ...string) *exec.Cmd {
	w.t.Helper()
	managerBinary.once.Do(func() {
		if out, err := exec.Command("go", "build", "-o", managerBinary.path, "..").CombinedOutput(); err != nil {
			managerBinary.err = fmt.Errorf("building the manager: %w: %s", err, out)
		}
	})
	if managerBinary.err != nil {
		w.t.Fatal(managerBinary.err)
	}
	config, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		w.t.Fatal(err)
	}
	as := asManager().Impersonate
	for _, user := range config.AuthInfos {
		user.Impersonate, user.ImpersonateGroups = as.UserName, as.Groups
	}
	file := filepath.Join(w.t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.Command(managerBinary.path, append([]string{"--kubeconfig=" + file, "--namespaces=" + w.namespace, "--metrics-bind-address=0",
		"--health-probe-bind-address=0", "--reserver-image=flashsale:test", "--leader-election-namespace=flashsale-system"}, flags...)...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &logged, &logged
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
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
			Sweep:    sales.SweepSpec{Interval: metav1.Duration{Duration: time.Second}},
			// Without it the API server takes no sale.
			Admission: sales.AdmissionSpec{TrustedProxies: []string{"10.0.0.0/8"}}},
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

// checkStatus asserts the rules of every status that a test sees.
func (w *world) checkStatus(sale *sales.FlashSale) {
	w.t.Helper()
	for _, broken := range teststatus.Violations(sale) {
		w.t.Errorf("%s: %s", sale.Name, broken)
	}
}

func readyReason(sale *sales.FlashSale) string {
	if c := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionReady); c != nil {
		return c.Reason
	}
	return ""
}

// setPods plays the kubelet: so many pods of a Deployment of the sale are ready.
func (w *world) setPods(name string, ready int32) {
	w.t.Helper()
	d := &appsv1.Deployment{}
	testmysql.Eventually(w.t, "Deployment "+name+" exists", func() bool {
		return k8s.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, d) == nil
	})
	before := d.DeepCopy()
	d.Status.Replicas, d.Status.ReadyReplicas, d.Status.AvailableReplicas = ready, ready, ready
	if err := k8s.Status().Patch(ctx, d, client.MergeFrom(before)); err != nil {
		w.t.Fatal(err)
	}
}

// beKubelet makes the pods of the sale's Deployments ready.
func (w *world) beKubelet(sale *sales.FlashSale) {
	w.t.Helper()
	w.setPods(reserverName(sale), sale.Spec.Reserver.Replicas)
	w.setPods(sweeperName(sale), 1)
}

// children names the sale's children, such as "Service/x-reserver".
func (w *world) children() (names []string) {
	w.t.Helper()
	kinds := maps.Clone(childKinds)
	kinds["Secret"] = func() client.Object { return &corev1.Secret{} }
	for kind, empty := range kinds {
		list := &unstructured.UnstructuredList{}
		gvk, err := apiutil.GVKForObject(empty(), scheme)
		if err != nil {
			w.t.Fatal(err)
		}
		list.SetGroupVersionKind(gvk)
		if err := k8s.List(ctx, list, client.InNamespace(w.namespace), client.MatchingLabels(managedLabel)); err != nil {
			w.t.Fatal(err)
		}
		for _, o := range list.Items {
			names = append(names, kind+"/"+o.GetName())
		}
	}
	slices.Sort(names)
	return names
}

// usual is how many children a running sale has that asks for nothing special: two Deployments, two Secrets, Service,
// PodDisruptionBudget and NetworkPolicy.
const usual = 7

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
