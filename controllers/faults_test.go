package controllers

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// life takes a short sale from its creation to the end of its object, under a manager that dies at the n-th of its steps:
// writes to the API server, and works in the database. A successor follows. Before says that the step is not done any more;
// else it is done, and its answer is lost. It gives the steps that the first manager made.
func life(t *testing.T, n int, before bool) (steps []string) {
	w := newWorld(t)
	var mu sync.Mutex
	died := make(chan struct{})
	first := w.manage(func(m *managed) {
		m.step = func(what string, write func() (*http.Response, error)) (*http.Response, error) {
			if strings.HasSuffix(what, "/events") || strings.HasPrefix(what, "POST events") { // of another goroutine, whenever it likes
				return write()
			}
			mu.Lock()
			steps = append(steps, what)
			hit := len(steps) == n
			mu.Unlock()
			if !hit {
				return write()
			}
			if !before {
				if response, err := write(); err == nil && response != nil {
					_ = response.Body.Close()
				}
			}
			m.cancel()
			close(died)
			return nil, errors.New("the manager was killed")
		}
	})
	var succession sync.WaitGroup
	t.Cleanup(succession.Wait)
	over := make(chan struct{})
	defer close(over)
	succession.Go(func() {
		select {
		case <-died:
			first.done.Wait()
			w.manage()
		case <-over:
		}
	})
	sale := w.makeSale("life", 3, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	w.beKubelet(sale)
	w.eventually(sale, "all pods are ready", func() bool { return readyReason(sale) == sales.ReasonLive })
	for _, buyer := range []string{"ann", "bob", "cat"} {
		w.buy(sale, buyer)
	}
	w.waitFor(sale, sales.PhaseClosed)
	if readyReason(sale) != sales.ReasonSoldOut || *sale.Status.Inventory != (sales.InventoryStatus{Loaded: 3, Sold: 3}) || sale.Status.Result.Sold != 3 || !sale.Status.Audit.Passed {
		t.Errorf("closed with %s: %+v", readyReason(sale), sale.Status)
	}
	testmysql.Eventually(t, "the children are gone", func() bool { return len(w.children()) == 0 })
	if report := testmysql.Audit(t, w.store, saleID(sale)); report.Sold != 3 || report.Units != 3 {
		t.Errorf("the rows are %+v", report)
	}
	if err := k8s.Delete(ctx, sale); err != nil {
		t.Fatal(err)
	}
	w.gone(sale)
	mu.Lock()
	defer mu.Unlock()
	return slices.Clone(steps)
}

// The manager may be killed at any step, before it or after; its successor finishes the sale, and nothing is done twice.
func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	steps := life(t, 0, false)
	for _, want := range []string{"PATCH flashsales/life", "work register", "work load", "PATCH flashsales/life/status", "POST secrets", "DELETE secrets/life-reserver-keys", "PATCH deployments/life-sweeper",
		"PATCH deployments/life-reserver", "PATCH services/life-reserver", "work close", "work audit", "DELETE deployments/life-reserver"} {
		if !slices.Contains(steps, want) {
			t.Errorf("no step %q among %q", want, steps)
		}
	}
	for i, what := range steps {
		for _, before := range []bool{true, false} {
			if before && strings.HasPrefix(what, "work") {
				continue // seen when it is done
			}
			t.Run(fmt.Sprintf("%02d %s, before %t", i+1, strings.ReplaceAll(what, "/", " "), before), func(t *testing.T) {
				t.Parallel()
				if made := life(t, i+1, before); len(made) < i+1 {
					t.Logf("this time there were %d steps only", len(made))
				}
			})
		}
	}
}

// proxy is a TCP relay in front of the database, which a test can cut.
type proxy struct {
	listener net.Listener
	target   string
	mu       sync.Mutex
	down     bool
	conns    []net.Conn
}

func newProxy(t *testing.T, target string) *proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, target: target}
	t.Cleanup(func() { _ = listener.Close(); p.cut(true) })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			p.relay(conn)
		}
	}()
	return p
}

func (p *proxy) relay(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		_ = conn.Close()
		return
	}
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		_ = conn.Close()
		return
	}
	p.conns = append(p.conns, conn, server)
	copyTo := func(to, from net.Conn) { _, _ = io.Copy(to, from); _ = to.Close() }
	go copyTo(conn, server)
	go copyTo(server, conn)
}

func (p *proxy) cut(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
	if down {
		for _, c := range p.conns {
			_ = c.Close()
		}
		p.conns = nil
	}
}

// proxied gives the sale's Secret a way to the database that can be cut.
func (w *world) proxied() *proxy {
	mysql := testmysql.Config(w.t)
	p := newProxy(w.t, mysql.Addr)
	w.secret(map[string]string{"dsn": strings.Replace(w.dsn, mysql.Addr, p.listener.Addr().String(), 1)})
	return p
}

// The database goes away at each phase: the fault is named, in a condition and an event; nothing else changes; and it goes
// on when the database is back.
func TestTheDatabaseGoesAwayAtEveryPhase(t *testing.T) {
	t.Parallel()
	for phase, tt := range map[sales.Phase]struct {
		starts time.Duration
		units  int32
		get    func(w *world, sale *sales.FlashSale)
		then   sales.Phase // when the database is back
	}{
		sales.PhaseLoading:   {3 * time.Hour, 3_000_000, nil, sales.PhaseLoading},
		sales.PhaseScheduled: {3 * time.Hour, 3, nil, sales.PhaseScheduled},
		sales.PhaseWarming:   {30 * time.Minute, 3, nil, sales.PhaseWarming},
		sales.PhaseLive:      {-time.Second, 3, nil, sales.PhaseLive},
		sales.PhaseSuspended: {-time.Second, 3, func(w *world, sale *sales.FlashSale) { w.patch(sale, func() { sale.Spec.Suspend = true }) }, sales.PhaseSuspended},
		sales.PhaseDraining: {-time.Second, 3, func(w *world, sale *sales.FlashSale) {
			w.claim(sale, "ann")
			w.patch(sale, func() { sale.Spec.EndTime = new(metav1.Now()) })
		}, sales.PhaseDraining},
	} {
		t.Run(string(phase), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			p := w.proxied()
			w.manage()
			sale := w.makeSale("away", tt.units, tt.starts).Warmup(time.Hour).In(w)
			if tt.get != nil {
				w.waitFor(sale, sales.PhaseLive)
				tt.get(w, sale)
			}
			w.waitFor(sale, phase)
			running := len(w.children())
			p.cut(true)
			if phase == sales.PhaseScheduled { // idle: its next look is minutes away
				w.patch(sale, func() { sale.Annotations = map[string]string{"touched": "true"} })
			}
			w.eventually(sale, "the fault is named", func() bool { return readyReason(sale) == inventory.ReasonUnreachable })
			if sale.Status.Phase != phase || len(w.children()) < running {
				t.Errorf("phase %s, children %v: want phase %s and %d children", sale.Status.Phase, w.children(), phase, running)
			}
			testmysql.Eventually(t, "an event names it", func() bool { return w.events(sale, corev1.EventTypeWarning)[inventory.ReasonUnreachable] != "" })
			if phase == sales.PhaseLoading { // half loaded, it is deleted without waiting for the rest
				p.cut(false)
				w.eventually(sale, "loading goes on", func() bool { return readyReason(sale) != inventory.ReasonUnreachable })
				if err := k8s.Delete(ctx, sale); err != nil {
					t.Fatal(err)
				}
				w.gone(sale)
				return
			}
			p.cut(false)
			w.eventually(sale, "the fault is gone", func() bool {
				return meta.IsStatusConditionTrue(sale.Status.Conditions, sales.ConditionDatabaseReachable) && sale.Status.Phase == tt.then
			})
			p.cut(true)
			if err := k8s.Delete(ctx, sale); err != nil {
				t.Fatal(err)
			}
			w.eventually(sale, "the deletion says what it waits for", func() bool { return strings.Contains(sale.Status.Message, "waiting for the database") })
			p.cut(false)
			if phase == sales.PhaseDraining {
				w.waitFor(sale, sales.PhaseDraining) // ann's hold is live
				w.patch(sale, func() { sale.Annotations = map[string]string{sales.AnnotationForceDelete: "true"} })
			}
			w.gone(sale)
			testmysql.Eventually(t, "the children are gone", func() bool { return len(w.children()) == 0 })
		})
	}
}

// The queue of terminations was stuck behind a check that nobody answered: a deletion waits for the database for a
// bounded time, then goes on (Retain), or says in its status what to do (Delete).
func TestCaseK26(t *testing.T) {
	t.Parallel()
	for _, policy := range []sales.DeletionPolicy{sales.DeletionRetain, sales.DeletionDelete} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			p := w.proxied()
			w.manage()
			sale := w.makeSale("k26", 3, -time.Second).Policy(policy).In(w)
			w.waitFor(sale, sales.PhaseLive)
			w.claim(sale, "ann") // she could not pay any more: the pods do not reach the database either
			p.cut(true)
			if err := k8s.Delete(ctx, sale); err != nil {
				t.Fatal(err)
			}
			w.eventually(sale, "the cause is named", func() bool { return readyReason(sale) == inventory.ReasonUnreachable })
			if policy == sales.DeletionDelete {
				w.eventually(sale, "the status says what to do", func() bool { return strings.Contains(sale.Status.Message, sales.AnnotationForceDelete) })
				w.patch(sale, func() { sale.Annotations = map[string]string{sales.AnnotationForceDelete: "true"} })
			}
			w.gone(sale)
			testmysql.Eventually(t, "the children are gone", func() bool { return len(w.children()) == 0 })
		})
	}
}

// The tables were dropped by hand: the operator crashed on the clean-up, again and again.
func TestCaseK22(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("k22", 3, -time.Second).Policy(sales.DeletionDelete).In(w)
	w.waitFor(sale, sales.PhaseLive)
	admin := testmysql.Admin(t)
	for _, q := range []string{"DROP DATABASE " + w.database(), "CREATE DATABASE " + w.database()} {
		if _, err := admin.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually(sale, "the loss is named", func() bool {
		return sale.Status.Phase == sales.PhaseFailed && readyReason(sale) == sales.ReasonTablesLost
	})
	testmysql.Eventually(t, "one warning", func() bool { return w.events(sale, corev1.EventTypeWarning)[string(sales.PhaseFailed)] != "" })
	if err := k8s.Delete(ctx, sale); err != nil {
		t.Fatal(err)
	}
	w.gone(sale)
	testmysql.Eventually(t, "the children are gone", func() bool { return len(w.children()) == 0 })
}

// The namespace is deleted first: Secret and children go in any order, new objects are refused. The finalizer ends.
func TestTheNamespaceGoesFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("ns", 3, -time.Second).TTL(3 * time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	w.claim(sale, "ann")
	w.eventually(sale, "one is held", func() bool { return sale.Status.Inventory.Held == 1 })
	if err := k8s.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}); err != nil {
		t.Fatal(err)
	}
	// What the namespace controller does, which envtest lacks.
	for _, o := range []client.Object{&appsv1.Deployment{}, &corev1.Service{}} {
		if err := k8s.DeleteAllOf(ctx, o, client.InNamespace(w.namespace)); err != nil {
			t.Fatal(err)
		}
	}
	if err := k8s.Delete(ctx, sale); err != nil {
		t.Fatal(err)
	}
	w.gone(sale) // no pod sweeps ann's hold when it has lapsed, so the controller does
	if report := testmysql.Audit(t, w.store, saleID(sale)); report.Held != 0 {
		t.Errorf("the rows are %+v", report.Counts)
	}
}

// refuse makes the API server's answer to a write, as long as on is set.
func refuse(on *atomic.Bool, path string, code int, reason metav1.StatusReason, message string) func(*managed) {
	return func(m *managed) {
		m.step = func(what string, write func() (*http.Response, error)) (*http.Response, error) {
			if !on.Load() || !strings.Contains(what, path) {
				return write()
			}
			body := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","message":%q,"reason":%q,"code":%d}`, message, reason, code)
			return &http.Response{StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
				Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body))}, nil
		}
	}
}

// The API server refuses writes. The cause is in the condition and in an event, and the sale goes on when it is gone.
func TestRefusedWrites(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, path string
		code       int
		answer     metav1.StatusReason
		message    string
		reason     string // in the condition; "" when a refusal is not to be seen
		stalled    bool
	}{
		{"throttled", "deployments/", http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, "too many requests, please try again later", sales.ReasonThrottled, false},
		{"forbidden", "services/", http.StatusForbidden, metav1.StatusReasonForbidden, "services is forbidden: policy of the platform team", sales.ReasonApplyFailed, true},
		{"server error", "networkpolicies/", http.StatusInternalServerError, metav1.StatusReasonInternalError, "etcdserver: request timed out", sales.ReasonApplyFailed, false},
		{"conflict of the status", "flashsales/refused/status", http.StatusConflict, metav1.StatusReasonConflict, "the object has been modified", "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			var on atomic.Bool
			on.Store(true)
			w.manage(refuse(&on, tt.path, tt.code, tt.answer, tt.message))
			sale := w.makeSale("refused", 3, -time.Second).In(w)
			if tt.reason != "" {
				w.eventually(sale, "the cause is named", func() bool { return readyReason(sale) == tt.reason })
				if c := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionReserversAvailable); c == nil || !strings.Contains(c.Message, tt.message) {
					t.Errorf("ReserversAvailable does not tell: %+v", c)
				}
				if stalled := meta.IsStatusConditionTrue(sale.Status.Conditions, sales.ConditionStalled); stalled != tt.stalled {
					t.Errorf("stalled is %t, want %t", stalled, tt.stalled)
				}
				testmysql.Eventually(t, "an event names the cause", func() bool { return strings.Contains(w.events(sale, corev1.EventTypeWarning)[tt.reason], tt.message) })
			} else {
				testmysql.Eventually(t, "the sale is loaded all the same", func() bool {
					snap, err := w.store.Snapshot(ctx, saleID(sale))
					return err == nil && snap.Loaded == 3
				})
			}
			on.Store(false)
			w.eventually(sale, "it goes on", func() bool {
				return sale.Status.Phase == sales.PhaseLive && readyReason(sale) == sales.ReasonUnavailable
			})
			if len(w.children()) != usual {
				t.Errorf("children %v", w.children())
			}
		})
	}
}

// A ResourceQuota keeps the Deployments from being made.
func TestQuotaExceeded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "none", Namespace: w.namespace},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/deployments.apps": resource.MustParse("0")}}}
	if err := k8s.Create(ctx, quota); err != nil {
		t.Fatal(err)
	}
	quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: corev1.ResourceList{"count/deployments.apps": resource.MustParse("0")}} // as the quota controller does
	if err := k8s.Status().Update(ctx, quota); err != nil {
		t.Fatal(err)
	}
	w.manage()
	sale := w.makeSale("quota", 3, -time.Second).In(w)
	w.eventually(sale, "the quota is named", func() bool { return readyReason(sale) == sales.ReasonQuotaExceeded })
	testmysql.Eventually(t, "an event names it", func() bool { return w.events(sale, corev1.EventTypeWarning)[sales.ReasonQuotaExceeded] != "" })
	if err := k8s.Delete(ctx, quota); err != nil {
		t.Fatal(err)
	}
	w.eventually(sale, "it goes on", func() bool { return readyReason(sale) == sales.ReasonUnavailable && len(w.children()) == usual })
}

// startPod makes a pod of the Deployment, as its ReplicaSet would, in a namespace that enforces the restricted standard.
func (w *world) startPod(d *appsv1.Deployment, status corev1.PodStatus) *corev1.Pod {
	w.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: d.Name + "-", Namespace: d.Namespace, Labels: d.Spec.Template.Labels, Annotations: d.Spec.Template.Annotations}, Spec: d.Spec.Template.Spec}
	if err := k8s.Create(ctx, pod); err != nil {
		w.t.Fatal(err)
	}
	pod.Status = status
	if err := k8s.Status().Update(ctx, pod); err != nil {
		w.t.Fatal(err)
	}
	return pod
}

// Why pods are not ready is told in the sale.
func TestWhyPodsAreNotReady(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("pods", 3, 30*time.Minute).Warmup(time.Hour).In(w)
	w.waitFor(sale, sales.PhaseWarming)
	d := &appsv1.Deployment{}
	testmysql.Eventually(t, "the Deployment is there", func() bool {
		return k8s.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: reserverName(sale)}, d) == nil
	})
	waiting := func(reason, message string) corev1.PodStatus {
		return corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{Name: "serve", Image: "flashsale:none",
			State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2, Reason: "Error"}}}}}
	}
	for _, tt := range []struct {
		status        corev1.PodStatus
		reason, says  string
		personIsAsked bool
	}{
		{waiting("ErrImagePull", "not found"), sales.ReasonImageUnavailable, "image flashsale:none cannot be pulled: not found", false},
		{waiting("ImagePullBackOff", `Back-off pulling image "flashsale:none": ErrImagePull: not found`), sales.ReasonImageUnavailable, "image flashsale:none cannot be pulled: not found", false},
		{waiting("InvalidImageName", "couldn't parse image name"), sales.ReasonImageUnavailable, "couldn't parse image name", true},
		{corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
			Message: "0/3 nodes are available: 3 Insufficient cpu."}}}, sales.ReasonUnschedulable, "3 Insufficient cpu", false},
		{waiting("CrashLoopBackOff", "back-off 10s restarting failed container"), sales.ReasonPodsFailing, "exit code 2, Error", false},
		{waiting("CreateContainerConfigError", `secret "gone" not found`), sales.ReasonPodsFailing, `secret "gone" not found`, false},
	} {
		pod := w.startPod(d, tt.status)
		w.eventually(sale, tt.reason+" is told", func() bool {
			return readyReason(sale) == tt.reason && strings.Contains(sale.Status.Conditions[0].Message, tt.says)
		})
		if stalled := meta.IsStatusConditionTrue(sale.Status.Conditions, sales.ConditionStalled); stalled != tt.personIsAsked {
			t.Errorf("%s: stalled is %t", tt.says, stalled)
		}
		if tt.reason == sales.ReasonImageUnavailable && !tt.personIsAsked { // it tries again, and for a moment there is nothing to see
			version := sale.Status.Conditions
			pod.Status = waiting("ContainerCreating", "")
			if err := k8s.Status().Update(ctx, pod); err != nil {
				t.Fatal(err)
			}
			w.patch(sale, func() { sale.Spec.HoldTTL.Duration++ }) // so that it is looked at
			w.seenSpec(sale)
			if readyReason(sale) != tt.reason || sale.Status.Conditions[0].Message != version[0].Message {
				t.Errorf("while it tries again: %+v", sale.Status.Conditions[0])
			}
		}
		testmysql.Eventually(t, "an event tells it", func() bool { return strings.Contains(w.events(sale, corev1.EventTypeWarning)[tt.reason], tt.says) })
		if err := k8s.Delete(ctx, pod, client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
		w.eventually(sale, "the reason is gone with the pod", func() bool { return readyReason(sale) == sales.ReasonUnavailable })
	}
	before := d.DeepCopy()
	d.Status.Conditions = append(d.Status.Conditions, appsv1.DeploymentCondition{Type: appsv1.DeploymentReplicaFailure, Status: corev1.ConditionTrue, Reason: "FailedCreate",
		Message: `pods "x" is forbidden: exceeded quota: pods, requested: pods=1, used: pods=0, limited: pods=0`})
	if err := k8s.Status().Patch(ctx, d, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	w.eventually(sale, "the quota of the pods is told", func() bool { return readyReason(sale) == sales.ReasonQuotaExceeded })
}

// After a conflict the old leader still believes it leads: two act at once, and one of them stops for a while in the middle.
func TestCaseK27(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	paused := w.startProcess(nil, "--leader-elect=false")
	const units = 600_000
	sale := w.makeSale("k27", units, time.Hour).In(w)
	testmysql.Eventually(t, "the first loads", func() bool {
		snap, err := w.store.Snapshot(ctx, saleID(sale))
		if err == nil && snap.Loaded == units {
			t.Fatal("loading was over before the first was paused")
		}
		return err == nil && snap.Loaded > 0
	})
	if err := paused.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	other := w.startProcess(nil, "--leader-elect=false")
	w.waitFor(sale, sales.PhaseScheduled) // whatever locks the first held, the server has ended its sessions
	w.patch(sale, func() {
		sale.Spec.HoldTTL.Duration = time.Minute
		sale.Spec.StartTime = metav1.NewTime(time.Now().Add(-time.Second))
	})
	w.waitFor(sale, sales.PhaseLive)
	w.buy(sale, "ann")
	if err := paused.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	// Both are awake. Then the one that was paused is alone, and has to know what happened.
	w.eventually(sale, "the sale is shown", func() bool { return sale.Status.Inventory.Sold == 1 })
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	w.patch(sale, func() { sale.Spec.MaxPerBuyer = 2 })
	w.eventually(sale, "the one that was paused goes on", func() bool { return sale.Status.ObservedGeneration == sale.Generation })
	snap, err := w.store.Snapshot(ctx, saleID(sale))
	if err != nil || snap.HoldTTL != time.Minute || snap.MaxPerBuyer != 2 || snap.Loaded != units {
		t.Errorf("the row is %+v, %v: an old spec came back", snap, err)
	}
	if report := testmysql.Audit(t, w.store, saleID(sale)); report.Available != units-1 || report.Sold != 1 {
		t.Errorf("the rows are %+v", report.Counts)
	}
}

// The leader is killed while a sale is live; the other takes over when the lease is up. The sale does not notice.
func TestLeaderFailover(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	leader := w.startProcess(nil)
	sale := w.makeSale("failover", 3, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	lease := &coordinationv1.Lease{}
	leaseKey := client.ObjectKey{Namespace: "flashsale-system", Name: "manager.sales.flashsale.dev"}
	if err := k8s.Get(ctx, leaseKey, lease); err != nil {
		t.Fatal(err)
	}
	first := *lease.Spec.HolderIdentity
	w.startProcess(nil) // stands by
	if err := leader.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	w.buy(sale, "ann") // nobody leads
	w.eventually(sale, "the other shows what happened", func() bool { return sale.Status.Inventory.Sold == 1 })
	if err := k8s.Get(ctx, leaseKey, lease); err != nil || *lease.Spec.HolderIdentity == first || *lease.Spec.LeaseTransitions != 1 {
		t.Errorf("lease %+v, %v; want another holder than %s", lease.Spec, err, first)
	}
	w.buy(sale, "bob")
	w.eventually(sale, "and goes on", func() bool { return sale.Status.Inventory.Sold == 2 })
}
